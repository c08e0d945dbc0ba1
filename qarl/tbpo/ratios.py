"""Sequence-level ratios, and clipping them to a band.

A ratio is the geometric mean of a response's token ratios, as in GSPO (arXiv 2507.18071). It is one number per
response.

The code stores r - 1, the deviation of a ratio r from 1, because the paper's bands are only 3e-4 to 7e-4 wide. FP32's
relative error is 1e-7. So r has an error of 1e-7, but a deviation of 3e-4 has an error of only 3e-11.

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to this maximum, so that no ratio exceeds e^20 = 4.9e8. There is no minimum, because the
exponential of a negative number cannot overflow."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean [B] of `values` [B, T] over the positions where `mask` is true. An empty row gives 0.

    A NaN where `mask` is false affects neither the mean nor its gradient.
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


def largest_update(deviation: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the largest |r - 1| * sqrt(T) of the responses, FP64 []. `deviation`, `lengths`: [B], T = 0 if empty.

    The root makes short and long responses comparable: r, a mean over T tokens, spreads like 1 / sqrt(T)."""
    return (deviation.double().abs() * lengths.sqrt()).amax()


def inside(deviation: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return bool in the same shape: whether each deviation is in its band, including the edges."""
    return (deviation >= lower) & (deviation <= upper)


def clip_to_band(ratio: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, learns: torch.Tensor) -> torch.Tensor:
    """Return each ratio unchanged if its `learns` is true. Otherwise detach it and clip it to [1 + lower, 1 + upper].

    The gradient of a clipped ratio is exactly +0, because `torch.where` is used instead of `clamp`.
    """
    return torch.where(learns, ratio, ratio.detach().clamp(1 + lower, 1 + upper))
