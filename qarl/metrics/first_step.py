"""Say what the first step of a run has shown, if nothing can be learned from it.

A warning sign needs several steps, because a single step may be chance (`qarl.metrics.warning_signs`). But in a first
step in which all rewards of each group are equal, the reward or the environment is often wrong, and a user can see that
before the steps that follow are paid for. The metrics say it in every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EQUAL = "actor/zero_advantage_frac"
_SCORE = "critic/score"
_BATCHES = "filter_groups/num_gen_batches"
_TURNS = "turns/max"
_MASKED = "overlong/masked_frac"


def first_step_note(metrics: Mapping[str, Any]) -> str | None:
    """Return what to look at if the first step teaches nothing, or None. `metrics`: of that step."""
    if metrics.get(_MASKED) == 1:
        text = "every response was cut off, and actor.mask_truncated_responses leaves them all out"
        look = "raise data.max_response_length, or set actor.mask_truncated_responses=false"
        return f"nothing can be learned from the first step: {text}\n  {look}"
    if metrics.get(_EQUAL) != 1:
        return None
    text = "all responses to each prompt had the same reward"
    low, high = (metrics.get(f"{_SCORE}/{kind}") for kind in ("min", "max"))
    if low is not None and low == high:
        text = f"every response had the reward {low:g}"
    if batches := metrics.get(_BATCHES):
        text += f", in all {batches:g} batches that filter_groups sampled"
    look = "look at the responses in report.html and at what the reward function returns for them"
    if metrics.get(_TURNS) == 1:
        text += "; every conversation ended with its first turn"
        look = (
            "look at the turns in report.html: what rollout.environment returns for them, and whether "
            "data.max_response_length has room for its answer and another turn"
        )
    return f"nothing can be learned from the first step: {text}\n  {look}"
