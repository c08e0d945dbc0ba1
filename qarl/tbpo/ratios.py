"""Sequence-level ratios, and clipping them to a band.

A ratio here is the geometric mean of a response's token ratios, as in GSPO (arXiv 2507.18071). It is one number per
response, shared by all its tokens. The paper's bands are only 3e-4 to 7e-4 wide, so the code computes with r - 1, the
ratio's deviation from 1. FP32 has a relative precision of 1e-7. For a ratio near 1 this is an error of 1e-7, but for a
deviation of 3e-4 it is only 3e-11.

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to this maximum before the exponential, so that no ratio exceeds e^20 = 4.9e8. They have no
minimum, because only large values overflow. For very negative ones, ratio and gradient go to 0 and stay exact."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of `values` [B, T] over the positions where `mask` is true: [B], 0 for an empty row.

    Masked values are replaced, not multiplied by zero, so a NaN among them affects neither the mean nor its gradient.
    """
    return torch.where(mask, values, 0.0).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def sequence_log_ratio(log_prob: torch.Tensor, reference_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return mean_t(log_prob - reference_log_prob) over each response's valid tokens: [B], FP32, 0 for an empty one.

    Both inputs, [B, T], are upcast to FP32 before the subtraction. In BF16 the difference of two log-probs near -1
    would have steps of 4e-3, ten times the width of a band.
    """
    return masked_mean(log_prob.float() - reference_log_prob.float(), mask)


def ratio_deviation(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) - 1 in the same shape. It is never Inf, see `MAX_LOG_RATIO`."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO))


def inside(deviation: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return whether each deviation is in its band, edges included: boolean, same shape."""
    return (deviation >= lower) & (deviation <= upper)


def clip_to_band(ratio: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, learns: torch.Tensor) -> torch.Tensor:
    """Return each ratio unchanged if its `learns` is true, otherwise detached and clipped to [1 + lower, 1 + upper].

    `torch.where` makes the gradient of a detached ratio exactly +0; the gradient of `clamp` might not be.
    """
    return torch.where(learns, ratio, ratio.detach().clamp(1 + lower, 1 + upper))
