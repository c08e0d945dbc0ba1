"""The conversations in verl's batches, from the masks of their responses and from what an agent loop says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from qarl.turns.conversation import Conversation, spans_of
from qarl.turns.metrics import turn_metrics

LOOPS_ALONE = ("turns/max_turns_frac", "turns/failures")
"""Metrics of what only the loop `qarl_environment` says."""


def conversations_of(
    prompts: Sequence[Tensor], masks: Sequence[Tensor], told: Sequence[Mapping[str, Any]]
) -> list[Conversation] | None:
    """Return the conversations of a batch, or None if no response has a context and no loop says that it held one.

    Args:
        prompts: token ids of each row.
        masks: of each response, int64 [tokens].
        told: the `extra_fields` of each row's loop.
    """
    turns = [spans_of(mask.tolist()) for mask in masks]
    of_model = [bool(mask.all()) for mask in masks]
    if all(of_model) and not any("finish_reason" in each for each in told):
        return None
    rows = zip(prompts, masks, turns, told, strict=True)
    return [
        Conversation(
            prompt.tolist(),
            response_token_ids=[0] * len(mask),
            turns=spans,
            failures=int(each.get("failures", 0)),
            finish_reason=each.get("finish_reason"),
        )
        for prompt, mask, spans, each in rows
    ]


def conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of `qarl.turns.metrics`, without those that no loop has told."""
    metrics = turn_metrics([each for each in conversations if each.turns])
    if all(each.finish_reason is None for each in conversations):
        return {name: value for name, value in metrics.items() if name not in LOOPS_ALONE}
    return metrics
