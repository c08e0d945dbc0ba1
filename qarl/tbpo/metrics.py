"""The statistics of each `tbpo_loss` call, and the metrics of a step that are computed from them.

A statistic's key is `sum/NAME`, `min/NAME`, `max/NAME` or `all/NAME`. The prefix says how to combine the values of
micro-batches and ranks. A value of `all/NAME` is a list, and lists are concatenated.

Statistics of single tokens are in `qarl.tbpo.tokens`.

Legend: B responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from qarl.tbpo.config import TBPOConfig
from qarl.tbpo.reading import Unread
from qarl.tbpo.tokens import Vectors, class_metrics, contribution_metrics


def reduce_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from the statistics of all its `tbpo_loss` calls (micro-batches and ranks).

    Metrics over no response (such as neg_outside_band_frac without negative samples) are left out.

    All metrics are over responses, except for those of `qarl.tbpo.tokens.contribution_metrics`:
        actor/pos_outside_band_frac, actor/neg_outside_band_frac: share of the responses with A > 0 (A < 0) that are
            outside their band. If the share is near 1, the policy learns almost nothing
        actor/inside_band_frac: share of the responses with A != 0 that are inside their band
        actor/zero_advantage_frac: share of all responses that have A = 0
        actor/seq_ratio_mean, _min, _max: r; actor/seq_ratio_abs_dev_max: the largest |r - 1|
        actor/update_size: the largest |r - 1| * sqrt(T), T the tokens of the response
        actor/seq_tis_imp_ratio_mean, _max: w before the cap
        actor/seq_tis_above_cap_frac, actor/seq_tis_below_cap_frac: share of all responses with w > C (w < 1/C)
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
            metrics[f"actor/{name}"] = float(
                torch.tensor(total[key], dtype=torch.float64).quantile(0.95)
            )
    return metrics


def combine(statistics: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Combine the statistics of several calls into one dict, as the prefixes of their keys say."""
    collected: dict[str, list[Any]] = {}
    for call in statistics:
        for key, value in call.items():
            collected.setdefault(key, []).append(value)
    return {key: _COMBINE[key.split("/")[0]](values) for key, values in collected.items()}


def after_first_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return metrics about bands from `reduce_metrics`, with `_after_first` appended to their names. Also return the
    metrics of `qarl.tbpo.tokens.class_metrics`.

    `statistics`: from all mini-batches of a step except the first. In the first mini-batch r is 1 by construction, so
    only later mini-batches show whether the bands fit and how far updates move tokens."""
    later = list(statistics)
    metrics = reduce_metrics(later)
    about_bands = ("_band_frac", "/band_p95", "/band_factor_p95")
    renamed = {
        f"{name}_after_first": value
        for name, value in metrics.items()
        if name.endswith(about_bands)
    }
    return renamed | class_metrics(combine(later))


def response_metrics(total: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that every loss has, from combined `response_statistics` and statistics of tokens, or {} if
    there was no response."""
    if not total.get("sum/responses"):
        return {}
    low = total["min/deviation"]
    high = total["max/deviation"]
    return means(total, _RESPONSE_MEANS) | {
        "actor/seq_ratio_min": 1 + low,
        "actor/seq_ratio_max": 1 + high,
        "actor/seq_ratio_abs_dev_max": max(abs(low), abs(high)),
        "actor/update_size": total["max/update"],
        **contribution_metrics(total),
    }


def means(total: Mapping[str, Any], names: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return sum/NUMERATOR divided by sum/DENOMINATOR for each name in `names`, without those over nothing."""
    return {
        name: total[f"sum/{numerator}"] / total[f"sum/{denominator}"]
        for name, (numerator, denominator) in names.items()
        if f"sum/{numerator}" in total and total[f"sum/{denominator}"]
    }


_COMBINE: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "all": lambda lists: list(chain.from_iterable(lists)),
}
_RESPONSE_MEANS = {
    "actor/zero_advantage_frac": ("zero", "responses"),
    "actor/seq_ratio_mean": ("ratio", "responses"),
}
_MEANS = {
    "actor/pos_outside_band_frac": ("pos_outside", "pos"),
    "actor/neg_outside_band_frac": ("neg_outside", "neg"),
    "actor/inside_band_frac": ("inside", "nonzero"),
    "actor/seq_tis_imp_ratio_mean": ("mismatch", "responses"),
    "actor/seq_tis_above_cap_frac": ("above_cap", "responses"),
    "actor/seq_tis_below_cap_frac": ("below_cap", "responses"),
}


def tbpo_statistics(
    deviation: torch.Tensor,
    mismatch: torch.Tensor,
    weight: torch.Tensor,
    advantage: torch.Tensor,
    band: tuple[torch.Tensor, torch.Tensor],
    in_band: torch.Tensor,
    lengths: torch.Tensor,
    tokens: Vectors,
    config: TBPOConfig,
) -> Unread:
    """Return sums and extremes over the non-empty responses, `tokens`, and two lists over the responses with A != 0:

    all/scaled_distance   |r - 1| * sqrt(T / band_reference_length)
    all/bands_away        r - 1 divided by the band's edge of the same sign, so 1 is on the edge; 0 without such an edge
    """
    nonempty = lengths > 0
    pos = advantage > 0
    neg = advantage < 0
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
    values = response_statistics(deviation, advantage, nonempty)
    values |= {f"sum/{name}": value.double().sum() for name, value in sums.items()}
    values["max/update"] = largest_update(deviation, lengths)
    values["max/mismatch"] = mismatch.double().masked_fill(~nonempty, -math.inf).amax()
    scaled = deviation.abs() * (lengths / config.band_reference_length).sqrt()
    away = deviation / torch.where(deviation < 0, *band)
    without = advantage == 0
    lists = {
        "all/scaled_distance": scaled.masked_fill(without, math.nan),
        "all/bands_away": away.masked_fill(without, math.nan),
    }
    return {**values, **tokens, **lists}


def largest_update(deviation: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the largest |r - 1| * sqrt(T) of the responses, FP64 []. `deviation`, `lengths`: [B], T = 0 if empty.

    The root makes short and long responses comparable: r, a mean over T tokens, spreads like 1 / sqrt(T)."""
    return (deviation.double().abs() * lengths.sqrt()).amax()


def response_statistics(
    deviation: torch.Tensor, advantage: torch.Tensor, nonempty: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the statistics of responses that every loss has, FP64 scalars. `deviation`: r - 1. `nonempty`: which
    responses count. All are [B]."""
    sums = {
        "responses": nonempty,
        "zero": nonempty & (advantage == 0),
        "ratio": torch.where(nonempty, 1 + deviation, 0.0),
    }
    values = {f"sum/{name}": value.double().sum() for name, value in sums.items()}
    values["min/deviation"] = deviation.double().masked_fill(~nonempty, math.inf).amin()
    values["max/deviation"] = deviation.double().masked_fill(~nonempty, -math.inf).amax()
    return values
