"""Statistics of each call of an objective, and the metrics of a step that are computed from them.

A statistic's key is `sum/NAME`, `min/NAME` or `max/NAME`. The prefix says how to combine the values of micro-batches
and ranks. `qarl.tbpo.metrics` uses the same keys, and `qarl.tbpo.reduce_metrics` combines its statistics. A call leaves
them on the device (`qarl.tbpo.reading`); metrics are computed from what has been read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qarl import tbpo
from qarl.tbpo.loss import ratio_deviation, sequence_log_ratio
from qarl.tbpo.metrics import (
    combine,
    largest_update,
    means,
    response_metrics,
    response_statistics,
)
from qarl.tbpo.reading import Unread
from qarl.tbpo.tokens import class_metrics, token_statistics

_VERL = {
    "actor/pg_clipfrac": "clipped",
    "actor/pg_clipfrac_lower": "clipped_lower",
    "actor/ppo_kl": "ppo_kl",
}
"""Maps verl's metrics of a call, which are means over its tokens, to the names of our sums."""
_IS_TBPO = "sum/pos_outside"
"""A statistic that only TBPO has."""
_MEANS = {
    "actor/pg_clipfrac": ("clipped", "kept_tokens"),
    "actor/pg_clipfrac_lower": ("clipped_lower", "kept_tokens"),
    "actor/ppo_kl": ("ppo_kl", "kept_tokens"),
    "correction/rejected_response_frac": ("rejected_responses", "all_responses"),
    "correction/rejected_token_frac": ("rejected_tokens", "all_tokens"),
    "correction/weight_mean": ("weight", "weighted_tokens"),
    "correction/weight_zero_frac": ("weight_zero", "weighted_tokens"),
}


def correction_statistics(mask: Tensor, keep: Tensor, weight: Tensor | None) -> Unread:
    """Return the statistics of a correction: counts of what it rejected, and its weights on the kept tokens.

    `mask`, `keep`: the tokens before and after the rejection, bool [B, T]. `weight`: [B, T], or None."""
    nonempty = mask.any(dim=-1)
    rejected_responses = nonempty & ~keep.any(dim=-1)
    rejected_tokens = mask & ~keep
    values: Unread = {"sum/all_responses": nonempty.sum(), "sum/all_tokens": mask.sum()}
    values["sum/rejected_responses"] = rejected_responses.sum()
    values["sum/rejected_tokens"] = rejected_tokens.sum()
    if weight is not None:
        on_kept = weight.detach().double().masked_fill(~keep, 0.0)
        zero = keep & (weight == 0)
        values["sum/weight"] = on_kept.sum()
        values["sum/weight_squared"] = on_kept.square().sum()
        values["sum/weight_zero"] = zero.sum()
        values["sum/weighted_tokens"] = keep.sum()
        values["min/weight"] = on_kept.masked_fill(~keep, math.inf).amin()
        values["max/weight"] = on_kept.amax()
    return values


def loss_statistics(
    log_prob: Tensor,
    old_log_prob: Tensor,
    against: Tensor,
    rollout_log_prob: Tensor,
    advantage: Tensor,
    keep: Tensor,
    verl_metrics: dict[str, float],
    *,
    uses_ratio: bool = True,
) -> Unread:
    """Return the statistics of a call of verl's losses. `advantage`: [B]; `keep`: bool [B, T]; the log-probs: [B, T].
    `uses_ratio`: whether the loss has a ratio.

    The ratios of a response are geometric means over its kept tokens, as TBPO's are, so that runs can be compared. They
    are to `against`: the old log-probs, or with bypass_mode the rollout's. The size of the update, and the statistics
    of tokens without the prefix `rollout_`, are always to the old ones, so they contain the mismatch only if those are
    the rollout's."""
    with torch.no_grad():
        nonempty = keep.any(dim=-1)
        tokens = keep.sum()
        deviation = ratio_deviation(sequence_log_ratio(log_prob, against, keep))
        values: Unread = dict(response_statistics(deviation, advantage, nonempty))
        values["sum/kept_tokens"] = tokens.double()
        lengths = keep.sum(dim=-1)
        if uses_ratio:
            values["max/ratio"] = largest_update(deviation, lengths)
        update = ratio_deviation(sequence_log_ratio(log_prob, old_log_prob, keep))
        values["max/update"] = largest_update(update, lengths)
        for key, name in _VERL.items():
            if key in verl_metrics:
                values[f"sum/{name}"] = verl_metrics[key] * tokens
        of_tokens = token_statistics(log_prob, old_log_prob, rollout_log_prob, advantage, keep)
        return {**values, **of_tokens}


def reduce_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from the statistics of all its calls (micro-batches and ranks).

    For TBPO, `qarl.tbpo.reduce_metrics` defines the metrics. For other losses, over kept tokens or responses:
        actor/pg_clipfrac: share of tokens that are clipped
        actor/pg_clipfrac_lower: share of tokens that are clipped by dual clip's third bound
        actor/ppo_kl: mean of old_log_prob - log_prob over tokens
        actor/zero_advantage_frac, actor/seq_ratio_*, actor/update_size, actor/*zero_centred_loss_*, actor/*k1,
            actor/*k3: as for TBPO
        actor/ratio_size: the same as actor/update_size for the ratio of the loss (`reinforce` has none). With
            bypass_mode, and if the old log-probs are the rollout's, it contains the mismatch
    For every loss with a correction:
        correction/rejected_response_frac: share of responses of which no token is kept
        correction/rejected_token_frac: share of rejected tokens
        correction/weight_mean, _min, _max, _zero_frac, _ess: mean, minimum and maximum of the weights on kept tokens,
            the share of weights that are 0, and the effective sample size mean(w)^2 / mean(w^2)
    """
    statistics = list(statistics)
    total = combine(statistics)
    metrics = tbpo.reduce_metrics(statistics) if _IS_TBPO in total else response_metrics(total)
    metrics |= means(total, _MEANS)
    if total.get("sum/responses") and "max/ratio" in total:
        metrics["actor/ratio_size"] = total["max/ratio"]
    if total.get("sum/weighted_tokens"):
        metrics |= {
            "correction/weight_min": total["min/weight"],
            "correction/weight_max": total["max/weight"],
        }
        if total["sum/weight_squared"]:
            square = total["sum/weight_squared"] * total["sum/weighted_tokens"]
            metrics["correction/weight_ess"] = total["sum/weight"] ** 2 / square
    return metrics


def after_first_metrics(statistics: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of later mini-batches, with `_after_first` appended to their names.

    For TBPO, `qarl.tbpo.after_first_metrics` defines them. For other losses, these are `pg_clipfrac*` of
    `reduce_metrics` and (under their own names) the metrics of `qarl.tbpo.tokens.class_metrics`.

    `statistics`: from all mini-batches of a step except the first, in which every ratio is 1 by construction."""
    later = list(statistics)
    if any(_IS_TBPO in name for name in later):
        return tbpo.after_first_metrics(later)
    clipped = {
        name: value for name, value in reduce_metrics(later).items() if "/pg_clipfrac" in name
    }
    return {f"{name}_after_first": value for name, value in clipped.items()} | class_metrics(
        combine(later)
    )


def update_metrics(mini_batches: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Return the metrics of a local update from the statistics of each mini-batch's micro-batches.

    Besides the statistics of a loss, these contain `sum/loss` and, with a reference policy, `sum/kl_loss`."""
    every = [statistics for mini_batch in mini_batches for statistics in mini_batch]
    later = [statistics for mini_batch in mini_batches[1:] for statistics in mini_batch]
    metrics = reduce_metrics(every) | after_first_metrics(later)
    for metric, name in (("actor/pg_loss", "sum/loss"), ("actor/kl_loss", "sum/kl_loss")):
        if name in every[0]:
            metrics[metric] = sum(statistics[name] for statistics in every) / len(mini_batches)
    return metrics
