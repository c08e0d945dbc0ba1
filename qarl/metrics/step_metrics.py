"""Metrics of every step: scores, lengths, and the mismatch between trainer and rollout.

A metric that verl also has (`verl/trainer/ppo/rollout_corr_helper.py`, `metric_utils.py`, `utils/debug/metrics.py`) is
defined as in verl, but its prefix is `mismatch/` instead of `rollout_corr/`. There are two differences from verl:

- Statistics are computed in FP64. In FP32, exp(δ) - δ - 1 has no correct digit for the small δ of an aligned trainer
  (below 3e-4). δ itself is computed in FP32, as in the loss.
- Means over responses leave out responses without tokens. verl counts the ratio of such a response as 1.

The metrics include quantiles, the maximum and the effective sample size, because the mean of |δ| can hide problems
(arXiv 2605.14220).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qarl.metrics.weight_bins import W_BINS

# verl's bound on log-ratios before exp, and its default truncation of token weights.
SAFETY_BOUND = 20.0
ROLLOUT_IS_THRESHOLD = 2.0

_PIECE = 1 << 20
"""Tokens that are computed together, so that FP64 intermediates stay small."""
_ORDER = {"max": 1.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_HALF = 1 << 16
"""Values of the upper, and of the lower, half of a number's 32 bits."""

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all ranks, element by element."""


def mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Compare the two policies on the sampled tokens, with δ = old_log_prob - rollout_log_prob in nats per token.

    - `mismatch/abs_mean`, `abs_max`, `abs_p50`, `abs_p90`, `abs_p99`, `abs_p999`: statistics of |δ| over tokens
    - `mismatch/k1` = mean(-δ) and `mismatch/k3` = mean(exp(δ) - δ - 1): estimates of KL(rollout‖trainer), called `kl`
      and `k3_kl` in verl
    - `mismatch/ess`: effective sample size of the token weights min(exp(δ), 2), as a fraction of the number of tokens.
      It is called `rollout_is_eff_sample_size` in verl
    - `mismatch/training_ppl`: mean over responses of the trainer's perplexity
    - `mismatch/ppl_ratio`: mean over responses of the trainer's perplexity divided by the rollout's
    - `mismatch/w_to_50`, ..., `mismatch/w_above_200` (`W_BINS`): histogram of w, the geometric mean of exp(δ) over a
      response (the weight of TBPO before its cap): share of the responses with w up to 0.5, from there to 0.8, ...
    - `mismatch/pearson`: correlation of the two probabilities over tokens, called `rollout_actor_probs_pearson_corr` in
      verl. It is NaN if one of the two is constant

    All three arguments are [batch, response_length]. The mask is bool or 0/1. Values outside the mask are ignored.
    """
    mask = response_mask.bool()
    old = old_log_prob.detach()[mask]
    rollout = rollout_log_prob.detach()[mask]
    return token_mismatch(old, rollout, lengths=mask.sum(-1))


@torch.no_grad()
def token_mismatch(
    old: Tensor,
    rollout: Tensor,
    lengths: Tensor,
    reduce: Reduce = lambda value: value,
) -> dict[str, float]:
    """Return `mismatch_metrics` of log-probs without padding, computed on their device, or {} without any token.

    `old`, `rollout`: the tokens of all responses, one response after the other. `lengths`: int64, the tokens of each
    response. If ranks have different responses, all must call this function together with `reduce`.
    """
    old = old.float()
    rollout = rollout.float()
    delta = old - rollout
    pieces = list(zip(old.split(_PIECE), rollout.split(_PIECE), strict=True))
    lengths = lengths[lengths > 0]
    mean_delta = _means(delta, lengths)
    perplexities = (-_means(old, lengths)).exp().sum()
    ratios = (-mean_delta).exp().sum()
    responses = lengths.new_tensor(len(lengths), dtype=torch.float64)
    of_responses = torch.stack([responses, lengths.sum().double(), perplexities, ratios])
    of_tokens = torch.stack([_sums(*piece) for piece in pieces]).sum(0)
    totals = reduce(torch.cat((of_responses, of_tokens, _histogram(mean_delta))))
    responses, tokens, perplexities, ratios, *sums = totals[: -len(W_BINS)].tolist()
    if not tokens:
        return {}
    means = _TokenMeans(*(total / tokens for total in sums))
    probabilities = (means.old_probability, means.rollout_probability)
    spreads = [_spread(*piece, *probabilities) for piece in pieces]
    covariance, variance, rollout_variance = reduce(torch.stack(spreads).sum(0)).tolist()
    product = variance * rollout_variance
    values = {
        "abs_mean": means.magnitude,
        **_order_statistics(delta.abs(), int(tokens), reduce),
        "k1": means.surprise,
        "k3": means.k3,
        "ess": means.weight * means.weight / means.weight_square,
        "training_ppl": perplexities / responses,
        "ppl_ratio": ratios / responses,
        "pearson": covariance / math.sqrt(product) if product > 0 else math.nan,
    }
    metrics = {f"mismatch/{name}": value for name, value in values.items()}
    shares = (totals[-len(W_BINS) :] / responses).tolist()
    return metrics | dict(zip(W_BINS, shares, strict=True))


class _TokenMeans(NamedTuple):
    """Means over tokens, in the order of `_sums`."""

    magnitude: float
    surprise: float
    k3: float
    weight: float
    weight_square: float
    old_probability: float
    rollout_probability: float


def _means(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each response, FP64. `lengths`: of the responses, all positive."""
    if not len(lengths):
        return lengths.double()
    sums = torch.segment_reduce(values.double(), "sum", lengths=lengths)
    return sums / lengths


def _histogram(mean_delta: Tensor) -> Tensor:
    """Return the number of responses in each bin of `W_BINS`, FP64. NaN is in none. `mean_delta`: log w of each."""
    w = mean_delta.exp()
    bounds = [-math.inf, *W_BINS.values()]
    edges = torch.tensor(bounds, dtype=torch.float64, device=w.device)
    below = (w[:, None] <= edges).sum(0)
    return below.diff().double()


def _sums(old: Tensor, rollout: Tensor) -> Tensor:
    """Return the sums over tokens, FP64 [7]: |δ|, -δ, exp(δ) - δ - 1, weight, its square, both probabilities."""
    delta = (old - rollout).double()
    ratios = delta.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    weights = ratios.clamp(max=ROLLOUT_IS_THRESHOLD)
    values = (
        delta.abs(),
        -delta,
        delta.expm1() - delta,
        weights,
        weights.square(),
        old.double().exp(),
        rollout.double().exp(),
    )
    return torch.stack([value.sum() for value in values])


def _spread(old: Tensor, rollout: Tensor, mean: float, other_mean: float) -> Tensor:
    """Return sums over tokens, FP64 [3]: the product and squares of both probabilities' deviations from their means."""
    a = old.double().exp() - mean
    b = rollout.double().exp() - other_mean
    products = (a * b, a.square(), b.square())
    return torch.stack([product.sum() for product in products])


def _order_statistics(magnitude: Tensor, tokens: int, reduce: Reduce) -> dict[str, float]:
    """Return the maximum and the quantiles of `magnitude`, FP32 and not negative, over the `tokens` of all ranks.

    Read as integers, the bits of such numbers have the order of the numbers. So counting the upper 16 bits, and then
    the lower 16 bits of the numbers in one bin, finds the number at any place exactly, without sorting or gathering.
    Between two numbers a quantile is linear, as in NumPy.
    """
    bits = magnitude.contiguous().view(torch.int32)
    positions = {name: share * (tokens - 1) for name, share in _ORDER.items()}
    bounds = {*map(math.floor, positions.values()), *map(math.ceil, positions.values())}
    numbers = _numbers_at(sorted(bounds), bits, reduce)
    if math.isnan(numbers[tokens - 1]):  # as in NumPy, a NaN makes all of them NaN
        return {f"abs_{name}": math.nan for name in positions}
    statistics = {}
    for name, position in positions.items():
        below = numbers[math.floor(position)]
        above = numbers[math.ceil(position)]
        statistics[f"abs_{name}"] = below + (position % 1) * (above - below)
    return statistics


def _numbers_at(positions: list[int], bits: Tensor, reduce: Reduce) -> dict[int, float]:
    """Return the numbers at `positions` of the sorted order of all ranks. `bits`: this rank's numbers as int32."""
    upper = bits >> 16
    ends = reduce(torch.bincount(upper, minlength=_HALF)).cumsum(0)
    at = torch.tensor(positions, device=ends.device)
    bins = torch.searchsorted(ends, at, right=True)
    ends_of_previous = ends[(bins - 1).clamp(min=0)]
    before = torch.where(bins > 0, ends_of_previous, 0)
    within = (at - before).tolist()
    highs = bins.tolist()
    lower_halves = [bits[upper == high] & (_HALF - 1) for high in highs]
    counts = torch.stack([torch.bincount(lower, minlength=_HALF) for lower in lower_halves])
    ends_in_bins = reduce(counts).cumsum(1)
    numbers = {}
    for i, position in enumerate(positions):
        low = int(torch.searchsorted(ends_in_bins[i], within[i], right=True))
        number = torch.tensor(highs[i] << 16 | low, dtype=torch.int32)
        numbers[position] = float(number.view(torch.float32))
    return numbers


def response_metrics(
    scores: Sequence[float] | Tensor,
    response_lengths: Sequence[int] | Tensor,
    finish_reasons: Sequence[str | None],
) -> dict[str, float]:
    """Return metrics of scores and lengths of one batch of responses, under verl's names. Lengths are in tokens.

    - `critic/score/*` leaves out empty (aborted) responses, as in verl. `critic/score/std` (of the population) is not
      in verl.
    - `response_length/clip_ratio` is the fraction of responses with the finish reason "length". In verl it is the
      fraction with the largest number of tokens.
    """
    length = np.asarray(response_lengths, dtype=np.float64)
    score = np.asarray(scores, dtype=np.float64)
    present = score[length > 0]
    truncated = [reason == "length" for reason in finish_reasons]
    return {
        **_mean_max_min("critic/score", present),
        "critic/score/std": float(present.std()) if present.size else math.nan,
        **_mean_max_min("response_length", length),
        "response_length/clip_ratio": float(np.mean(truncated)),
        "response/aborted_ratio": float((length == 0).mean()),
    }


def _mean_max_min(name: str, values: np.ndarray) -> dict[str, float]:
    kinds = ("mean", "max", "min")
    if not values.size:
        return {f"{name}/{kind}": math.nan for kind in kinds}
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in kinds}
