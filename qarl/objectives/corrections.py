"""Weights and rejections that correct the mismatch between trainer and rollout engine.

    r_corr = exp(old_log_prob - rollout_log_prob)      the mismatch alone
    r_ppo  = exp(log_prob - rollout_log_prob)          the mismatch and the updates since the rollout

- A weight multiplies a token's loss by r_corr, or by the product or geometric mean of r_corr over the response. The
  weight is kept within bounds (arXiv 2605.14220, equation 6; IcePop: arXiv 2510.18855).
- A rejection leaves out tokens or responses whose divergence is above a threshold (equations 7 to 11 of the same
  paper). The paper sums its divergences over the tokens of a response, as `seq_sum_k1` and `seq_sum_k3` do here.
- A veto leaves out a response if one of its tokens has almost no probability (Miles' notes on the mismatch, "Veto
  Mechanism").

verl's `rollout_corr_helper` computes token weights, sequence weights and rejections. verl 0.9.1 lacks the geometric
weight, the mode `clip` and the veto, so this module implements them. Log-ratios are clipped to 20 before an
exponential, as in verl.

Legend: B responses, T token positions.
"""

from __future__ import annotations

import math

import torch

from qarl.config.objectives import RolloutCorrectionConfig
from qarl.objectives import library

SAFETY_BOUND = 20.0
"""verl's bound on log-ratios."""


def weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrectionConfig
) -> torch.Tensor | None:
    """Return the weight of every token, FP32 [B, T], 0 outside `mask`. Return None if the correction has no weight.

    All tensors are [B, T]; `mask` is bool. With `rollout_is_batch_normalize`, pass the rows of a whole batch, because
    the weights are divided by their mean over these rows."""
    if correction.rollout_is is None:
        return None
    log_ratio = torch.where(mask, old_log_prob.detach().float() - rollout_log_prob.detach().float(), 0.0)
    if not mask.any():  # verl's function needs a token
        return torch.zeros_like(log_ratio)
    if library.has_weight(correction):
        return library.correction_weights(log_ratio, mask, correction)
    weight = _bounded(_ratio(log_ratio, mask, correction.rollout_is), correction) * mask
    if correction.rollout_is_batch_normalize:
        weight = weight / _mean(weight, mask, per_token=correction.rollout_is == "token").clamp(min=1e-8)
    return weight


def sequence_mis_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor | None:
    """Return masked importance weights, [B, T]: the product of r_corr over the response, or 0 if it is above `cap`.

    Source: "When Speed Kills Stability" (Liu et al. 2025, https://richardli.xyz/rl-collapse), sequence-level MIS."""
    mis = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_mode="mask", rollout_is_threshold=cap)
    return weights(old_log_prob, rollout_log_prob, mask, mis)


def kept(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    correction: RolloutCorrectionConfig,
) -> torch.Tensor:
    """Return `mask` without the rejected tokens, bool [B, T]. Each row is judged alone. All tensors are [B, T]."""
    if not mask.any():
        return mask
    found = mask
    if correction.rollout_rs:
        policy = log_prob if correction.rollout_rs_ratio == "ppo" else old_log_prob
        log_ratio = torch.where(mask, policy.detach().float() - rollout_log_prob.detach().float(), 0.0)
        found = library.rejection_mask(log_ratio, mask, correction)
    if correction.veto_threshold is not None:
        vetoed = mask & (old_log_prob.detach().float() < math.log(correction.veto_threshold))
        found = found & ~vetoed.any(dim=-1, keepdim=True)
    return found


def _ratio(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Return r_corr, [B, T], at `level`: of each token, or as a product or mean over the response."""
    if level != "token":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def _bounded(weight: torch.Tensor, correction: RolloutCorrectionConfig) -> torch.Tensor:
    """Return the weights within the bounds of `rollout_is_mode`."""
    upper, lower = correction.rollout_is_threshold, correction.lower
    if correction.rollout_is_mode == "truncate":
        return weight.clamp(max=upper)
    if correction.rollout_is_mode == "clip":
        return weight.clamp(lower, upper)
    outside = weight > upper
    if correction.rollout_is_mode == "icepop":
        outside = outside | (weight < lower)
    return weight.masked_fill(outside, 0.0)


def _mean(weight: torch.Tensor, mask: torch.Tensor, *, per_token: bool) -> torch.Tensor:
    """Return the mean weight, a scalar. The mean is over tokens if `per_token`, otherwise over responses."""
    if per_token:
        return weight.sum() / mask.sum()
    return weight.amax(dim=-1).sum() / mask.any(dim=-1).sum()
