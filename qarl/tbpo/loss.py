"""The TBPO loss (arXiv 2604.07853): sequence-level ratios, a band for each sign of advantage, a capped mismatch weight.

For response i with advantage A_i, over its valid tokens t:

    r_i = exp mean_t(log_prob - old_log_prob)              how far the policy has moved since the old log-probs
    w_i = exp mean_t(old_log_prob - rollout_log_prob)      how far the trainer is from the engine that sampled
    loss = - mean_i  clip(w_i, 1/C, C) * clip_band(r_i) * A_i        no gradient through w_i

    A_i > 0   band (-inf, 1 + seq_clip_ratio_high]: PPO's bound
    A_i < 0   band [1 - neg_seq_clip_ratio_low, 1 + neg_seq_clip_ratio_high]

Inside its band, a response of T_i tokens contributes the gradient -clip(w_i) * r_i * A_i / T_i per token. Outside its
band, it contributes zero. PPO and GSPO (verl's `compute_policy_loss_gspo`) instead take the larger of the clipped and
the unclipped loss. So they still push down a negative sample whose ratio is above the band, and the push grows with the
ratio.

The bands protect against what the paper calls "error tokens" (section 3.2). These are repetitive, garbled tokens of
quantized rollouts, mostly in negative samples. Their probability is very low, so their ratios become extreme.

The paper is ambiguous in two places. Each is an option here:

- `mismatch_outside_cap`: "truncate" (default) clips w_i to [1/C, C], as in section 3.2. "drop" removes a response with
  w_i outside [1/C, C] from the loss, as the paper's introduction says for r_i and w_i. The paper says "two-sided cap";
  we assume that its lower side is 1/C.
- `positive_band`: "upper" (default) limits positive samples only by the upper edge, the "standard PPO-style bound" of
  section 3.2. "two_sided" uses `seq_clip_ratio_low` too, because the table of appendix B gives it a value, 3e-4.

The option `band_scaling="length"` departs from the paper. log r_i is a mean over T_i tokens. If an update changes the
log-probs of a response's tokens about independently, the spread of log r_i is proportional to 1/sqrt(T_i). So a fixed
band is too narrow for short responses and has no effect on long ones. With the option, the distances of the band's
edges from 1 are multiplied by sqrt(band_reference_length / T_i). The default reference, 16384, is the paper's longest
response.

A ratio is the geometric mean of a response's token ratios, as in GSPO (arXiv 2507.18071). The code stores r - 1, the
deviation of a ratio r from 1, because the paper's bands are only 3e-4 to 7e-4 wide. FP32's relative error is 1e-7. So r
has an error of 1e-7, but a deviation of 3e-4 has an error of only 3e-11.

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from qarl.tbpo.config import MAX_LOG_RATIO, TBPOConfig
from qarl.tbpo.metrics import tbpo_statistics
from qarl.tbpo.reading import CHECKS, Checks, Unread, read
from qarl.tbpo.tokens import token_statistics


def sequence_log_ratio(
    log_prob: torch.Tensor, reference_log_prob: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return mean_t(log_prob - reference_log_prob) over each response's valid tokens: FP32 [B].

    An empty response gives 0. Both inputs, [B, T], are upcast to FP32 first. In BF16 the difference of two log-probs
    near -1 would have steps of 4e-3, ten times the width of a band. A NaN where `mask` is false has no
    effect on the mean or its gradient.
    """
    log_ratio = log_prob.float() - reference_log_prob.float()
    return torch.where(mask, log_ratio, 0.0).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def ratio_deviation(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio) - 1 in the same shape. `MAX_LOG_RATIO` keeps it finite."""
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO))


def clip_to_band(
    ratio: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, learns: torch.Tensor
) -> torch.Tensor:
    """Return each ratio unchanged if its `learns` is true. Otherwise detach it and clip it to [1 + lower, 1 + upper].

    The gradient of a clipped ratio is exactly +0, because `torch.where` is used instead of `clamp`.
    """
    return torch.where(learns, ratio, ratio.detach().clamp(1 + lower, 1 + upper))


def tbpo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: TBPOConfig,
    *,
    global_batch_size: int | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the TBPO loss of one (micro-)batch, a differentiable FP32 scalar, and statistics for `reduce_metrics`.

    Args:
        log_prob: [B, T], log-probs of the policy being trained, in any float dtype. Only this argument receives a
            gradient.
        old_log_prob: [B, T], the trainer's log-probs before this update. They must come from the same kernels as
            `log_prob`, because the bands are narrower than the noise between different kernels.
        rollout_log_prob: [B, T], the log-probs that the sampling engine reported.
        advantages: [B], or [B, T] constant over the valid tokens of each row.
        response_mask: [B, T], bool or 0/1: 1 on the response's tokens. Values at other positions are ignored, even NaN.
        global_batch_size: number of non-empty responses in the whole mini-batch, over all micro-batches and ranks. The
            loss is a sum divided by it, so the losses of all parts add up. Default: the number in this call. If
            gradients are averaged over ranks, multiply the loss by the number of ranks, as verl's `agg_loss` does.

    A response with an empty mask does not count. A response with A = 0, or one that `mismatch_outside_cap="drop"`
    removes, adds 0 to the sum and counts in the denominator. If there is no valid token, the loss is a differentiable
    0.

    Raises ValueError if `rollout_log_prob` is missing, shapes differ, the mask is not 0/1, a valid position has NaN or
    Inf, advantages vary within a response, or `global_batch_size` is less than the number of responses in this call.
    """
    loss, unread = unread_tbpo_loss(
        log_prob,
        old_log_prob,
        rollout_log_prob,
        advantages,
        response_mask,
        config,
        global_batch_size=global_batch_size,
    )
    (statistics,) = read([unread])
    return loss, statistics


def unread_tbpo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: TBPOConfig,
    *,
    global_batch_size: int | None,
) -> tuple[torch.Tensor, Unread]:
    """Do the same as `tbpo_loss`, but leave the statistics on the device, and all checks but those of shapes to `read`.

    With `global_batch_size` the host does not wait for the device.
    """
    before = {"old_log_prob": old_log_prob, "rollout_log_prob": rollout_log_prob}
    _check_shapes(log_prob, advantages, {**before, "response_mask": response_mask})
    valid = response_mask != 0
    advantage = _advantage_per_response(advantages, valid)
    tensors = {"log_prob": log_prob, **before}
    bad = _bad_values(tensors, advantages, advantage, response_mask, valid)
    if global_batch_size is None:
        global_batch_size = int(valid.any(dim=-1).sum())

    log_ratio = sequence_log_ratio(log_prob, old_log_prob.detach(), valid)
    deviation = ratio_deviation(log_ratio)
    lengths = valid.sum(dim=-1)
    lower, upper = _band(advantage, lengths, config)
    in_band = (deviation.detach() >= lower) & (deviation.detach() <= upper)

    log_mismatch = sequence_log_ratio(old_log_prob.detach(), rollout_log_prob.detach(), valid)
    cap = config.seq_tis_imp_ratio_cap
    mismatch = 1 + ratio_deviation(log_mismatch)
    weight = mismatch.clamp(1 / cap, cap)

    contributes = advantage != 0
    if config.mismatch_outside_cap == "drop":
        contributes = contributes & (mismatch == weight)
    surrogate = clip_to_band(1 + deviation, lower, upper, learns=in_band & contributes)
    response_loss = torch.where(contributes, -weight * advantage * surrogate, 0.0)
    loss = response_loss.sum() / max(global_batch_size, 1)

    with torch.no_grad():
        tokens = token_statistics(log_prob, old_log_prob, rollout_log_prob, advantage, valid)
        statistics = tbpo_statistics(
            deviation, mismatch, weight, advantage, (lower, upper), in_band, lengths, tokens, config
        )
        statistics[CHECKS] = Checks.of(bad, valid, global_batch_size)
    return loss, statistics


def _band(
    advantage: torch.Tensor, lengths: torch.Tensor, config: TBPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper edge of each response's band as values of r - 1: two tensors [B]."""
    positive_low = config.seq_clip_ratio_low if config.positive_band == "two_sided" else math.inf
    positive = advantage > 0
    lower = torch.full_like(advantage, -config.neg_seq_clip_ratio_low).masked_fill(
        positive, -positive_low
    )
    upper = torch.full_like(advantage, config.neg_seq_clip_ratio_high).masked_fill(
        positive, config.seq_clip_ratio_high
    )
    if config.band_scaling == "none":
        return lower, upper
    scale = (config.band_reference_length / lengths.clamp(min=1)).sqrt()
    return lower * scale, upper * scale


def _advantage_per_response(advantages: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the advantage at each response's first valid token: [B], FP32, 0 for an empty response."""
    if advantages.dim() == 2:
        first = valid.int().argmax(dim=-1, keepdim=True)
        advantages = advantages.gather(1, first).squeeze(1)
    return torch.where(valid.any(dim=-1), advantages.detach(), 0.0).float()


def _check_shapes(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    like_log_prob: Mapping[str, torch.Tensor | None],
) -> None:
    if like_log_prob["rollout_log_prob"] is None:
        raise ValueError(
            "rollout_log_prob is missing. TBPO weights each response by the mismatch of old_log_prob and the rollout's "
            "log-probs. A weight of 1 would hide the mismatch. Let the rollout return its log-probs (in verl: "
            "actor_rollout_ref.rollout.calculate_log_probs=True)"
        )
    shape = tuple(log_prob.shape)
    for name, tensor in like_log_prob.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, log_prob {shape}: they must be equal"
            )
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, expected {shape} or {shape[:1]}"
        )


def _bad_values(
    tensors: dict[str, torch.Tensor],
    advantages: torch.Tensor,
    advantage: torch.Tensor,
    response_mask: torch.Tensor,
    valid: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return what is wrong -> where it is, bool [B, T]."""
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)
    named = tensors | {"advantages": per_token.expand_as(valid)}
    bad = {
        f"{name} is NaN or Inf": valid & ~tensor.detach().isfinite()
        for name, tensor in named.items()
    }
    bad["response_mask is neither 0 nor 1"] = (response_mask != 0) & (response_mask != 1)
    varies = valid & (per_token.float() != advantage.unsqueeze(-1))
    bad["advantages varies within a response, but TBPO needs one number per response; first"] = (
        varies
    )
    return bad
