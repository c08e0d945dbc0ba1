"""Reads vLLM's completions: sampled log-probs, likeliest tokens, and the experts that routers chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def sampled_log_probs(completion: Any) -> list[float]:
    """Return the log-prob of each token. Raise RuntimeError if one has none."""
    flat = (
        completion.logprobs
    )  # vLLM's FlatLogprobs, in which the sampled token is the first of its position
    if len(flat) != len(completion.token_ids):
        raise RuntimeError(
            f"vLLM returned {len(flat)} log-probs for {len(completion.token_ids)} tokens"
        )
    return [flat.logprobs[start] for start in flat.start_indices]


def first_not_finite(log_probs: Sequence[Sequence[float]]) -> int | None:
    """Return the number of the first response with a log-prob that is NaN or Inf, or None."""
    for i, values in enumerate(log_probs):
        if not all(map(math.isfinite, values)):
            return i
    return None


def top_tokens(completion: Any) -> list[int]:
    """Return the likeliest token at each position."""
    flat = completion.logprobs
    spans = (range(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True))
    return [next(flat.token_ids[i] for i in position if flat.ranks[i] == 1) for position in spans]


def routed_experts(completion: Any) -> torch.Tensor:
    """Return the experts of each token but the last, uint8 or int16 [tokens - 1, layers, k]."""
    routed = completion.routed_experts
    return torch.tensor(routed, dtype=torch.uint8 if routed.dtype.itemsize == 1 else torch.int16)
