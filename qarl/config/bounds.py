"""Sane values of a numeric key. A value outside is allowed, but gives a warning.

The types in `qarl.config` refuse values that cannot work. `Sane`, beside a key's type, finds values that work but are
almost certainly mistakes, such as a learning rate of 4096. The bounds are wide, so every reasonable run is within them.
A key without `Sane` has no value to warn of: every value that its type allows is useful. `unusual_values` reports the
others when a run starts, in a dry run and in the doctor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from qarl.config.errors import show
from qarl.config.types import MANY_RESPONSES, Sane

if TYPE_CHECKING:
    from qarl.config import Config


@dataclass(frozen=True)
class Unusual:
    """A value outside its bounds: the dotted key, what is wrong, why, and what to write instead."""

    key: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.key}\n  why: {self.why}\n  fix: {self.fix}"


MOST_RESPONSES = 2**20


def unusual_values(config: Config) -> list[Unusual]:
    """Return values of `config` that are outside their bounds, and combinations of values that make no sense."""
    found = [_question(key, value, sane) for key, value, sane in _numbers(config) if not sane.low <= value <= sane.high]
    return [*found, *_together(config)]


def _numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float, Sane]]:
    """Yield dotted key, value and bounds of every number in a section that has bounds. An item's key is `key[i]`."""
    for name, info in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if hasattr(value, "model_fields"):
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, tuple):
            for i, (one, kind) in enumerate(zip(value, get_args(info.annotation), strict=True)):
                yield from ((f"{key}[{i}]", one, sane) for sane in kind.__metadata__ if isinstance(sane, Sane))
        elif value is not None:
            yield from ((key, value, sane) for sane in info.metadata if isinstance(sane, Sane))


def _question(key: str, value: float, sane: Sane) -> Unusual:
    below = value < sane.low
    limit, side = (sane.low, "below") if below else (sane.high, "above")
    fix = f"choose {show(sane.low)} to {show(sane.high)}, unless this is what you want"
    return Unusual(key, f"{key}={show(value)} is {side} {show(limit)}", sane.below if below else sane.above, fix)


def _together(config: Config) -> Iterator[Unusual]:
    """Yield combinations of values that make no sense. docs/ablations.md has the eight runs of the last one."""
    actor, data, rollout = config.actor, config.data, config.rollout
    warm_up, total = config.optim.lr_warmup_steps, config.trainer.total_training_steps
    if 0 < warm_up >= total:
        what = f"optim.lr_warmup_steps={warm_up} covers the whole run of {total} steps"
        yield Unusual("optim.lr_warmup_steps", what, "the learning rate would never reach its peak", "lower it")
    prompts, n = data.train_batch_size, rollout.n
    if prompts * n > MOST_RESPONSES:
        what = f"data.train_batch_size * rollout.n = {prompts} * {n} is above {MOST_RESPONSES} responses per step"
        yield Unusual("data.train_batch_size, rollout.n", what, MANY_RESPONSES, "lower one of the two")
    if rollout.top_k == 1:
        why = "only the likeliest token is left, so the responses to one prompt are alike and teach nothing"
        fix = "choose 2 or more, or -1 for all"
        yield Unusual("rollout.top_k", "rollout.top_k=1 leaves nothing to sample", why, fix)
    updates = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    if actor.loss == "reinforce" and updates != 1:
        what = f"actor.loss=reinforce makes {updates} updates per step"
        why = "it has no ratio to the policy that sampled, so every update after the first is biased"
        yield Unusual("actor.loss", what, why, f"set actor.ppo_mini_batch_size={prompts} and actor.ppo_epochs=1")
    from_rollout = actor.old_log_probs == "rollout"
    far = config.quant.align == "off" and config.quant.scheme in ("w4a16", "w4a8")
    if far and actor.loss != "reinforce" and (from_rollout or config.rollout_correction.bypass_mode):
        key = "actor.old_log_probs" if from_rollout else "rollout_correction.bypass_mode"
        what = "the ratio of the loss contains the mismatch of 4-bit rollouts"
        why = "it is far from 1 on some tokens before any update; in W4A16 eight of eight runs with GRPO collapsed"
        yield Unusual(key, what, why, "set quant.align=model, or actor.old_log_probs=recompute without bypass_mode")
