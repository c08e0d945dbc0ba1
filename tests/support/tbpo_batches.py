"""Batches with chosen sequence ratios, and bands wide enough to read."""

from __future__ import annotations

from typing import Any

import torch

# Bands wide enough to read: positive [0.9, 1.2], negative [0.9, 1.3], mismatch weight [0.5, 2].
WIDE: dict[str, Any] = {
    "seq_clip_ratio_high": 0.2,
    "seq_clip_ratio_low": 0.1,
    "neg_seq_clip_ratio_low": 0.1,
    "neg_seq_clip_ratio_high": 0.3,
    "seq_tis_imp_ratio_cap": 2.0,
}


def make_batch(
    ratios: list[float], weights: list[float], lengths: list[int], width: int = 5
) -> dict[str, torch.Tensor]:
    """log-probs whose sequence ratios are `ratios`, spread unevenly over each response's tokens."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(len(ratios), width, generator=generator) - 0.1
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    # Token deviations that cancel within a response: the mean over its tokens is the only thing that may count.
    wobble = torch.randn(len(ratios), width, generator=generator) * mask
    wobble = (wobble - wobble.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)) * mask
    return {
        "log_prob": (old + torch.tensor(ratios).log()[:, None] + 0.1 * wobble).requires_grad_(),
        "old_log_prob": old,
        "rollout_log_prob": old - torch.tensor(weights).log()[:, None] + 0.2 * wobble,
        "response_mask": mask,
    }
