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

Legend: B responses, T token positions (response_length).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from qarl.tbpo.config import TBPOConfig
from qarl.tbpo.ratios import clip_to_band, inside, largest_update, ratio_deviation, sequence_log_ratio
from qarl.tbpo.tokens import token_metrics, token_statistics


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
    _check_shapes(log_prob, old_log_prob, rollout_log_prob, advantages, response_mask)
    valid = response_mask != 0
    advantage = _advantage_per_response(advantages, valid)
    count = _check_values(log_prob, old_log_prob, rollout_log_prob, advantages, advantage, response_mask, valid)
    denominator = _denominator(count, global_batch_size)

    log_ratio = sequence_log_ratio(log_prob, old_log_prob.detach(), valid)
    deviation = ratio_deviation(log_ratio)
    lengths = valid.sum(dim=-1)
    lower, upper = _band(advantage, lengths, config)
    in_band = inside(deviation.detach(), lower, upper)

    log_mismatch = sequence_log_ratio(old_log_prob.detach(), rollout_log_prob.detach(), valid)
    cap = config.seq_tis_imp_ratio_cap
    mismatch = 1 + ratio_deviation(log_mismatch)
    weight = mismatch.clamp(1 / cap, cap)

    contributes = advantage != 0
    if config.mismatch_outside_cap == "drop":
        contributes = contributes & (mismatch == weight)
    surrogate = clip_to_band(1 + deviation, lower, upper, learns=in_band & contributes)
    response_loss = torch.where(contributes, -weight * advantage * surrogate, 0.0)
    loss = response_loss.sum() / denominator

    with torch.no_grad():
        statistics: dict[str, Any] = _statistics(
            deviation, log_ratio + log_mismatch, mismatch, weight, advantage, in_band, lengths
        )
        statistics |= _distances(deviation, lower, upper, lengths, advantage, config)
        statistics |= token_statistics(log_prob, old_log_prob, advantage, valid)
    return loss, statistics


def reduce_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from the statistics of all its `tbpo_loss` calls (micro-batches and ranks).

    A statistic's key is `sum/NAME`, `min/NAME`, `max/NAME` or `all/NAME`. The prefix says how to combine the values. A
    value of `all/NAME` is a list, and lists are concatenated. Metrics over no response (such as neg_outside_band_frac
    without negative samples) are left out.

    All metrics are over responses, not tokens:
        actor/pos_outside_band_frac, actor/neg_outside_band_frac: share of the responses with A > 0 (A < 0) that are
            outside their band. If the share is near 1, the policy learns almost nothing
        actor/inside_band_frac: share of the responses with A != 0 that are inside their band
        actor/zero_advantage_frac: share of all responses that have A = 0
        actor/seq_ratio_mean, _min, _max: r; actor/seq_ratio_abs_dev_max: the largest |r - 1|
        actor/update_size: the largest |r - 1| * sqrt(T), T the tokens of the response
        actor/seq_tis_imp_ratio_mean, _max: w before the cap
        actor/seq_tis_above_cap_frac, actor/seq_tis_below_cap_frac: share of all responses with w > C (w < 1/C)
        actor/zero_centred_loss_pos, _neg: -(r - 1) A, summed over the responses with A > 0 (A < 0) and divided by the
            number of all responses. Both are near 0 while the policy is near the old one (arXiv 2605.14220, eq. 5)
        actor/rollout_zero_centred_loss_pos, _neg: the same with r * w, the ratio to the rollout policy, instead of r
        actor/band_p95: 95% quantile of |r - 1| * sqrt(T / band_reference_length), over the responses with A != 0. Bands
            of this width, with `band_scaling="length"`, would leave 5% of them outside
        actor/band_factor_p95: the current bands, multiplied by this number, would leave 5% of them outside
    """
    total = combine(statistics)
    metrics = response_metrics(total)
    if not metrics:
        return {}
    metrics |= means(total, _MEANS)
    metrics["actor/seq_tis_imp_ratio_max"] = total["max/mismatch"]
    for name, key in (("band_p95", "all/scaled_distance"), ("band_factor_p95", "all/bands_away")):
        if total.get(key):
            metrics[f"actor/{name}"] = _quantile(total[key], 0.95)
    return metrics


def combine(statistics: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Combine the statistics of several calls into one dict, as the prefixes of their keys say."""
    how: dict[str, Callable[[list[Any]], Any]] = {
        "sum": sum,
        "min": min,
        "max": max,
        "all": lambda lists: list(chain.from_iterable(lists)),
    }
    collected: dict[str, list[Any]] = {}
    for one in statistics:
        for key, value in one.items():
            collected.setdefault(key, []).append(value)
    return {key: how[key.split("/")[0]](values) for key, values in collected.items()}


def after_first_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return metrics about bands from `reduce_metrics`, with `_after_first` appended to their names. Also return the
    metrics of `qarl.tbpo.tokens.token_metrics`.

    `statistics`: from all mini-batches of a step except the first. In the first mini-batch r is 1 by construction, so
    only later mini-batches show whether the bands fit and how far updates move tokens."""
    later = list(statistics)
    metrics = reduce_metrics(later)
    about_bands = ("_band_frac", "/band_p95", "/band_factor_p95")
    found = {f"{name}_after_first": value for name, value in metrics.items() if name.endswith(about_bands)}
    return found | token_metrics(combine(later))


def response_metrics(total: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of combined `response_statistics`, or {} if there was no response."""
    if not total.get("sum/responses"):
        return {}
    low, high = total["min/deviation"], total["max/deviation"]
    return means(total, {f"actor/{name}": (key, "responses") for name, key in _RESPONSE_MEANS.items()}) | {
        "actor/seq_ratio_min": 1 + low,
        "actor/seq_ratio_max": 1 + high,
        "actor/seq_ratio_abs_dev_max": max(abs(low), abs(high)),
        "actor/update_size": total["max/update"],
    }


def means(total: Mapping[str, Any], names: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return sum/NUMERATOR divided by sum/DENOMINATOR for each name in `names`, without those over nothing."""
    return {
        name: total[f"sum/{numerator}"] / total[f"sum/{denominator}"]
        for name, (numerator, denominator) in names.items()
        if f"sum/{numerator}" in total and total[f"sum/{denominator}"]
    }


_RESPONSE_MEANS = {
    "zero_advantage_frac": "zero",
    "seq_ratio_mean": "ratio",
    "zero_centred_loss_pos": "centred_pos",
    "zero_centred_loss_neg": "centred_neg",
    "rollout_zero_centred_loss_pos": "rollout_centred_pos",
    "rollout_zero_centred_loss_neg": "rollout_centred_neg",
}
_MEANS = {
    "actor/pos_outside_band_frac": ("pos_outside", "pos"),
    "actor/neg_outside_band_frac": ("neg_outside", "neg"),
    "actor/inside_band_frac": ("inside", "nonzero"),
    "actor/seq_tis_imp_ratio_mean": ("mismatch", "responses"),
    "actor/seq_tis_above_cap_frac": ("above_cap", "responses"),
    "actor/seq_tis_below_cap_frac": ("below_cap", "responses"),
}


def _band(advantage: torch.Tensor, lengths: torch.Tensor, config: TBPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper edge of each response's band as values of r - 1: two tensors [B]."""
    positive_low = config.seq_clip_ratio_low if config.positive_band == "two_sided" else math.inf
    positive = advantage > 0
    lower = torch.full_like(advantage, -config.neg_seq_clip_ratio_low).masked_fill(positive, -positive_low)
    upper = torch.full_like(advantage, config.neg_seq_clip_ratio_high).masked_fill(positive, config.seq_clip_ratio_high)
    if config.band_scaling == "none":
        return lower, upper
    scale = (config.band_reference_length / lengths.clamp(min=1)).sqrt()
    return lower * scale, upper * scale


def _distances(
    deviation: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    lengths: torch.Tensor,
    advantage: torch.Tensor,
    config: TBPOConfig,
) -> dict[str, list[float]]:
    """Return two numbers for each response with A != 0, both [number of such responses]:

    all/scaled_distance   |r - 1| * sqrt(T / band_reference_length)
    all/bands_away        r - 1 divided by the band's edge of the same sign, so 1 is on the edge; 0 without such an edge
    """
    scaled = deviation.abs() * (lengths / config.band_reference_length).sqrt()
    away = deviation / torch.where(deviation < 0, lower, upper)
    found = torch.stack([scaled, away])[:, advantage != 0].double().tolist()
    return {"all/scaled_distance": found[0], "all/bands_away": found[1]}


def _quantile(values: list[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def _statistics(
    deviation: torch.Tensor,
    log_rollout_ratio: torch.Tensor,
    mismatch: torch.Tensor,
    weight: torch.Tensor,
    advantage: torch.Tensor,
    in_band: torch.Tensor,
    lengths: torch.Tensor,
) -> dict[str, float]:
    """Return sums and extremes over the non-empty responses, with one transfer from the device to the CPU."""
    nonempty = lengths > 0
    pos, neg = advantage > 0, advantage < 0
    sums = {
        "pos": pos,
        "neg": neg,
        "nonzero": pos | neg,
        "pos_outside": pos & ~in_band,
        "neg_outside": neg & ~in_band,
        "inside": (pos | neg) & in_band,
        "above_cap": nonempty & (mismatch > weight),
        "below_cap": nonempty & (mismatch < weight),
        "mismatch": torch.where(nonempty, mismatch, 0.0),
    }
    values = response_statistics(deviation, log_rollout_ratio, advantage, nonempty)
    values |= {f"sum/{name}": value.double().sum() for name, value in sums.items()}
    values["max/update"] = largest_update(deviation, lengths)
    values["max/mismatch"] = mismatch.double().masked_fill(~nonempty, -math.inf).amax()
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def response_statistics(
    deviation: torch.Tensor, log_rollout_ratio: torch.Tensor, advantage: torch.Tensor, nonempty: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the statistics that every loss has, FP64 scalars. `deviation`: r - 1. `log_rollout_ratio`: the log-ratio
    to the rollout. `nonempty`: which responses count. All are [B]."""
    pos, neg = nonempty & (advantage > 0), nonempty & (advantage < 0)
    centred, rollout_centred = -deviation * advantage, -ratio_deviation(log_rollout_ratio) * advantage
    sums = {
        "responses": nonempty,
        "zero": nonempty & (advantage == 0),
        "ratio": torch.where(nonempty, 1 + deviation, 0.0),
        "centred_pos": torch.where(pos, centred, 0.0),
        "centred_neg": torch.where(neg, centred, 0.0),
        "rollout_centred_pos": torch.where(pos, rollout_centred, 0.0),
        "rollout_centred_neg": torch.where(neg, rollout_centred, 0.0),
    }
    values = {f"sum/{name}": value.double().sum() for name, value in sums.items()}
    values["min/deviation"] = deviation.double().masked_fill(~nonempty, math.inf).amin()
    values["max/deviation"] = deviation.double().masked_fill(~nonempty, -math.inf).amax()
    return values


def _denominator(count: int, global_batch_size: int | None) -> int:
    if global_batch_size is None:
        global_batch_size = count
    if global_batch_size < count:
        raise ValueError(
            f"global_batch_size is {global_batch_size} but this call alone has {count} non-empty responses; "
            "global_batch_size must be the number of non-empty responses in the whole mini-batch"
        )
    return max(global_batch_size, 1)


def _advantage_per_response(advantages: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the advantage at each response's first valid token: [B], FP32, 0 for an empty response."""
    if advantages.dim() == 2:
        first = valid.int().argmax(dim=-1, keepdim=True)
        advantages = advantages.gather(1, first).squeeze(1)
    return torch.where(valid.any(dim=-1), advantages.detach(), 0.0).float()


def _check_shapes(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor | None,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
) -> None:
    if rollout_log_prob is None:
        raise ValueError(
            "rollout_log_prob is missing. TBPO weights each response by the mismatch of old_log_prob and the rollout's "
            "log-probs. A weight of 1 would hide the mismatch. Let the rollout return its log-probs (in verl: "
            "actor_rollout_ref.rollout.calculate_log_probs=True)"
        )
    if log_prob.dim() != 2 or not log_prob.numel():
        raise ValueError(f"log_prob must be a non-empty [batch, response_length], got shape {tuple(log_prob.shape)}")
    shape, per_response = tuple(log_prob.shape), (log_prob.shape[0],)
    for name, tensor in (
        ("old_log_prob", old_log_prob),
        ("rollout_log_prob", rollout_log_prob),
        ("response_mask", response_mask),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, log_prob {shape}: they must be equal")
    if advantages.shape not in (shape, per_response):
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}, expected {shape} or {per_response}")


def _check_values(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    advantage: torch.Tensor,
    response_mask: torch.Tensor,
    valid: torch.Tensor,
) -> int:
    """Return the number of non-empty responses. Raise ValueError for the first bad value.

    If all values are valid, this makes only one transfer from the device to the CPU."""
    per_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)
    named = {
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "rollout_log_prob": rollout_log_prob,
        "advantages": per_token.expand_as(valid),
    }
    bad = {f"{name} is NaN or Inf": valid & ~tensor.detach().isfinite() for name, tensor in named.items()}
    bad["response_mask is neither 0 nor 1"] = (response_mask != 0) & (response_mask != 1)
    varies = valid & (per_token.float() != advantage.unsqueeze(-1))
    bad["advantages varies within a response, but TBPO needs one number per response; first"] = varies
    count, *found = torch.stack([valid.any(dim=-1).sum(), *(where.sum() for where in bad.values())]).tolist()
    for (what, where), number in zip(bad.items(), found, strict=True):
        if number:
            row, position = where.nonzero()[0].tolist()
            raise ValueError(f"{what} at row {row}, position {position} ({number} such positions in all)")
    return count
