"""The objectives of `actor.loss`: what the config, both backends and the tools ask of one.

An `Objective` names the function that computes it, which is imported when a run needs it. So this module, like the
whole config, needs no torch. A plugin adds its own with `register` (`qarl.plugins`). `qarl.objectives.loss` has the
formulas of QaRL's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qarl.config.registry import Registry, imported
from qarl.tbpo.config import KEYS as TBPO_KEYS

TOKEN_CLIP = (0.2, 0.2)
"""PPO's clip ratios (arXiv 1707.06347)."""
SEQUENCE_CLIP = (3e-4, 4e-4)
"""GSPO's clip ratios (arXiv 2507.18071, section 5.1)."""
CLIP_KEYS = ("clip_ratio_low", "clip_ratio_high")


@dataclass(frozen=True)
class Objective:
    """An objective as the rest of QaRL sees it.

    `function` is "module:function". Called with `qarl.objectives.loss.LossInputs` and the settings, it returns the loss
    of a part of a mini-batch and its statistics.
    """

    name: str
    function: str = "qarl.objectives.loss:verl_objective"
    verl_function: str | None = None
    """The name of verl's policy loss, for an objective that `verl_objective` computes."""
    needs_verl: bool = False
    """Whether verl must be installed."""
    keys: tuple[str, ...] = ()
    """Keys of the section actor that this objective reads and others may not."""
    clip: tuple[float, float] = TOKEN_CLIP
    """What clip_ratio_low and clip_ratio_high mean if they are null."""
    ratio_of_response: bool = False
    """Whether there is one ratio per response, the geometric mean over its tokens, instead of one per token."""
    mean_over_responses: bool = False
    """Whether only the mean seq-mean-token-mean defines it."""
    weights_mismatch: bool = False
    """Whether it weights each response by the mismatch itself, so that a second weight is refused."""
    has_ratio: bool = True
    """Whether it has a ratio to the policy that sampled. Without one, an update after the first is biased."""
    whitens_rewards: bool = False
    """Whether its advantages are the rewards, whitened over the batch."""
    positive_only: bool = False
    """Whether negative advantages count as 0."""

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        loaded: Callable[..., Any] = imported(self.function)
        return loaded


_OBJECTIVES = Registry[Objective]("objective", "actor.loss")
register = _OBJECTIVES.register
unregister = _OBJECTIVES.unregister
objective_names = _OBJECTIVES.names
get_objective = _OBJECTIVES.get
reading = _OBJECTIVES.reading


TBPO = register(
    Objective(
        name="tbpo",
        function="qarl.objectives.loss:tbpo_objective",
        keys=TBPO_KEYS,
        ratio_of_response=True,
        mean_over_responses=True,
        weights_mismatch=True,
    )
)
register(Objective(name="grpo", verl_function="vanilla", needs_verl=True, keys=CLIP_KEYS))
register(
    Objective(
        name="dual_clip",
        verl_function="vanilla",
        needs_verl=True,
        keys=(*CLIP_KEYS, "clip_ratio_c"),
    )
)
register(
    Objective(
        name="gspo",
        verl_function="gspo",
        needs_verl=True,
        keys=CLIP_KEYS,
        clip=SEQUENCE_CLIP,
        ratio_of_response=True,
        mean_over_responses=True,
    )
)
register(
    Objective(
        name="mis_gspo",
        function="qarl.objectives.loss:mis_gspo_objective",
        verl_function="gspo",
        needs_verl=True,
        keys=(*CLIP_KEYS, "mis_imp_ratio_cap"),
        clip=SEQUENCE_CLIP,
        ratio_of_response=True,
        mean_over_responses=True,
        weights_mismatch=True,
    )
)
register(
    Objective(
        name="positive_only",
        verl_function="vanilla",
        needs_verl=True,
        keys=CLIP_KEYS,
        positive_only=True,
    )
)
register(
    Objective(
        name="sapo",
        verl_function="sapo",
        needs_verl=True,
        keys=("tau_pos", "tau_neg"),
        mean_over_responses=True,
    )
)
register(
    Objective(
        name="reinforce",
        verl_function="reinforce",
        needs_verl=True,
        has_ratio=False,
        whitens_rewards=True,
    )
)
