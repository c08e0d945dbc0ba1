"""Adds `loss_mode=tbpo` and `loss_mode=qarl` to verl's policy losses. `qarl` is for all other values of `actor.loss`.

verl passes a micro-batch's log-probs, advantages, mask, and weights of `algorithm.rollout_correction` to a policy loss.
It does not pass `rollout_log_probs` or the number of non-empty responses in the mini-batch. The engine
(`qarl.verl.fsdp_engine`) knows both. During its forward and backward it stores both in a context variable of this
module.

verl's own losses divide the sum over sequences by `global_batch_size`, which is ppo_mini_batch_size * rollout.n. This
counts empty responses and the rows that verl adds to pad a batch, so these make the gradient smaller. QaRL's losses
divide by the number of non-empty responses over all micro-batches and ranks. As in verl's `agg_loss`, the loss is then
multiplied by the number of ranks, because FSDP averages gradients.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from qarl.config.objectives import get_objective
from qarl.objectives.loss import objective_loss
from qarl.tbpo.reading import read
from qarl.verl.batch_weights import normalises, without_batch
from qarl.verl.config_classes import actor_settings
from qarl.verl.keys import ACTOR, CORRECTION, POLICY_LOSS, QUANT, ROLLOUT
from qarl.verl.refusals import Conflict, refuse

RELIES = "qarl_old_log_probs"
"""Key in verl's batches, set by QaRL's trainer. The value is `rollout` or `auto` if `old_log_probs` are the rollout's.
Otherwise the key is missing or None."""
DIFFERING = "old_log_probs_differing"
"""Metric of the actor: number of tokens with δ != 0 in the first mini-batch of a dropped update."""


@dataclass
class MicroBatch:
    """Data about the current micro-batch that the engine passes to the loss.

    rollout_log_prob   [B, T], or None if the rollout reported no log-probs
    responses          number of non-empty responses in the whole mini-batch, over micro-batches and ranks
    tokens             number of tokens of these responses
    statistics         a dict that the loss fills for `qarl.objectives.metrics.reduce_metrics`
    """

    rollout_log_prob: torch.Tensor | None
    responses: int
    tokens: int = 1
    statistics: dict[str, float] = field(default_factory=dict)


MICRO_BATCH: ContextVar[MicroBatch | None] = ContextVar("qarl_micro_batch", default=None)


def loss_mode(loss_function: Any) -> str | None:
    """Return the `policy_loss.loss_mode` that verl has bound to its PPO loss, or None."""
    return getattr(_policy_loss(loss_function), "loss_mode", None)


def _policy_loss(loss_function: Any) -> Any:
    return getattr(getattr(loss_function, "keywords", {}).get("config"), "policy_loss", None)


def refuse_hidden_mismatch(
    loss_function: Any, relies: str | None, *, all_equal: bool, asked: bool
) -> None:
    """Raise UserError if an objective that weights the mismatch gets the rollout's log-probs as the trainer's.

    `relies`: the value of `RELIES`. `all_equal`: whether both are equal on every token. `asked`: whether verl has asked
    for the trainer's log-probs since the last step."""
    tbpo = loss_mode(loss_function) == "tbpo"
    named = getattr(_policy_loss(loss_function), "objective", None)
    weights = tbpo or (named is not None and get_objective(named).weights_mismatch)
    if weights and relies == "rollout":
        hidden = Conflict(
            key=f"{QUANT}.old_log_probs",
            value=relies,
            good="auto or recompute, or choose another objective",
            why="the objective weights the mismatch, and the weight of every response would be 1",
        )
        raise hidden.error()
    if tbpo and all_equal and not asked and relies is None:
        unasked = Conflict(
            key=f"{CORRECTION}.bypass_mode",
            value=True,
            good=False,
            why="old and rollout log-probs are equal on every token, and verl has not asked the actor for its own "
            "since the last step; TBPO's weight for the mismatch would always be 1",
        )
        raise unasked.error()


@register_policy_loss("tbpo")
@register_policy_loss("qarl")
def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the objective that `config.policy_loss` names. The signature is that of verl's policy losses. All tensors
    are [B, T]. `rollout_is_weights`: the weights of the trainer, for the whole batch of a step.

    The returned dict is empty, because the engine reports the metrics. Raise UserError if the batch has no rollout
    log-probs, if verl passes its own weights to TBPO, or if the configuration is not valid.
    """
    mode = config.policy_loss.loss_mode
    micro_batch = MICRO_BATCH.get()
    rollout = None if micro_batch is None else micro_batch.rollout_log_prob
    conflicts = []
    if mode == "tbpo" and rollout_is_weights is not None:
        weighted = f"TBPO already weights the mismatch ({POLICY_LOSS}.seq_tis_imp_ratio_cap caps its weight)"
        conflicts.append(Conflict(f"{CORRECTION}.rollout_is", "on", "null", weighted))
    if micro_batch is None:
        engine = f"loss_mode={mode} needs the rollout's log-probs, which only QaRL's FSDP engine passes to the loss"
        conflicts.append(Conflict(f"{ACTOR}.strategy", "another engine", "fsdp2", engine))
    if rollout is None:
        hidden = f"loss_mode={mode} needs the rollout's log-probs; the trainer's own would hide every mismatch"
        conflicts.append(Conflict(f"{ROLLOUT}.calculate_log_probs", False, True, hidden))
    refuse(conflicts)
    assert micro_batch is not None and rollout is not None
    settings = actor_settings(config, loss_agg_mode)
    if rollout_is_weights is None and normalises(settings.correction):
        raise without_batch("the trainer has passed no weights to the loss").error()
    loss, statistics = objective_loss(
        log_prob,
        old_log_prob,
        rollout.to(log_prob.device),
        advantages,
        response_mask,
        settings,
        weight=rollout_is_weights,
        responses=micro_batch.responses,
        tokens=micro_batch.tokens,
    )
    micro_batch.statistics.update(*read([statistics]))
    return loss * config.global_batch_info.get("dp_size", 1), {}
