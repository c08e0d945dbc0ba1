"""Sequence-level ratios, and clipping them to a band.

A ratio is the geometric mean of a response's token ratios, as in GSPO (arXiv 2507.18071). It is one number per
response. The paper's bands are only 3e-4 to 7e-4 wide, so the code stores r - 1, the ratio's deviation from 1, instead
of r. FP32 has a relative precision of 1e-7. This is an error of 1e-7 in a ratio near 1, but only 3e-11 in a deviation
of 3e-4.

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to this maximum before the exponential, so that no ratio exceeds e^20 = 4.9e8. They have no
minimum, because only large values overflow. For very negative ones, ratio and gradient go to 0 and stay exact."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean [B] of `values` [B, T] over the positions where `mask` is true. An empty row gives 0.

    A NaN at a masked position affects neither the mean nor its gradient.
    """
    return torch.where(mask, values, 0.0).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def sequence_log_ratio(log_prob: torch.Tensor, reference_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return mean_t(log_prob - reference_log_prob) over each response's valid tokens: FP32 [B].

    An empty response gives 0. Both inputs, [B, T], are upcast to FP32 first. In BF16 the difference of two log-probs
    near -1 would have steps of 4e-3, ten times the width of a band.
    """
    return masked_mean(log_prob.float() - reference_log_prob.float(), mask)


def ratio_deviation(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) - 1 in the same shape. `MAX_LOG_RATIO` keeps it finite."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO))


def inside(deviation: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return bool in the same shape: whether each deviation is in its band. The edges belong to the band."""
    return (deviation >= lower) & (deviation <= upper)


def clip_to_band(ratio: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, learns: torch.Tensor) -> torch.Tensor:
    """Return each ratio unchanged if its `learns` is true. Otherwise detach it and clip it to [1 + lower, 1 + upper].

    `torch.where` makes the gradient of a clipped ratio exactly +0. The gradient of `clamp` might not be.
    """
    return torch.where(learns, ratio, ratio.detach().clamp(1 + lower, 1 + upper))
