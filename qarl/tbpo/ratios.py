"""Sequence-level ratios and the band they are held to.

A ratio here is the geometric mean of a response's token ratios, as in GSPO (arXiv 2507.18071): one number a response,
shared by all its tokens. It is carried as its deviation from 1 because the paper's bands are 3e-4 to 7e-4 wide: near 1
FP32 resolves a ratio to 1e-7 only, but its deviation to a relative 1e-7.

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here before the exponential, so that no ratio exceeds e^20 = 4.9e8. Only the upper side can
overflow; below, the exponential goes to 0 smoothly and value and gradient stay exact."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of [B, T] values over the positions of each row where the boolean mask is true: [B], 0 for an empty row.

    Masked values are replaced, not multiplied by zero: a NaN among them reaches neither the mean nor its gradient.
    """
    return torch.where(mask, values, 0.0).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def sequence_log_ratio(log_prob: torch.Tensor, reference_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """mean_t(log_prob - reference_log_prob) over the valid tokens of each response: [B], FP32, 0 for an empty response.

    Both, [B, T], are upcast before the subtraction: in BF16 the difference of two log-probs near -1 would come in steps
    of 4e-3, ten times the width of a band.
    """
    return masked_mean(log_prob.float() - reference_log_prob.float(), mask)


def ratio_deviation(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio) - 1, same shape; never Inf, see `MAX_LOG_RATIO`."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO))


def inside(deviation: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Whether a deviation lies in its band, edges included: boolean, same shape."""
    return (deviation >= lower) & (deviation <= upper)


def clip_to_band(ratio: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, learns: torch.Tensor) -> torch.Tensor:
    """The ratio held to [1 + lower, 1 + upper], differentiable only where `learns`; elsewhere a constant.

    `torch.where` rather than the gradient of `clamp`, so that what does not learn has a gradient of exactly +0.
    """
    return torch.where(learns, ratio, ratio.detach().clamp(1 + lower, 1 + upper))
