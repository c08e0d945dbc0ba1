"""Statistics of single tokens: contributions to the loss, KL estimates, and how far tokens of each probability move.

Two papers need tokens, because the mean over a response hides them:

- arXiv 2605.14220, section 4.1: the contribution C(r) = -(r - 1) A of a token (equation 5), by the sign of A, and the
  estimates K1 = -log r and K3 = (r - 1) - log r. Both are computed for the ratio to the trainer's old policy and for
  the ratio to the rollout policy. Two tokens that are off by +2 and -2 nats have C = -5.5 A together, although the
  geometric mean of their ratios is 1. The paper does not say how it averages; here the sum is over the tokens of one
  sign, divided by the number of all tokens, so the two signs add up to the mean over tokens.
- arXiv 2604.07853, section 3.2: error tokens are unlikely tokens of negative samples, under the old policy and under
  the current one (figure 4c), and their ratios have the heaviest tail (figure 5b). The paper plots single tokens. Here
  they are counted in four classes of probability.

Statistics are in FP64, because K3 of small log-ratios would have no correct digit in FP32.

Legend: B responses, T token positions, N = B * T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from qarl.tbpo.config import BINS, CLASSES, MAX_LOG_RATIO, POLICIES, SIGNS

REFERENCES = ("", "rollout_")
"""Prefixes of the metrics of the ratio to the old policy, and of the ratio to the rollout policy."""
_GROUPS = tuple(f"{sign}_{label}" for sign in SIGNS for label in CLASSES)
_SUMS = ("tokens", "moved", "drift")

Vectors = dict[tuple[str, ...], torch.Tensor]
"""Maps the keys of statistics to their values, an FP64 tensor with an element for each key."""


def token_statistics(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    valid: torch.Tensor,
) -> Vectors:
    """Return the statistics of a call, on the device of `valid`, for `contribution_metrics` and `class_metrics`.

    Args:
        log_prob, old_log_prob, rollout_log_prob: [B, T]. Values at positions that are not valid are ignored.
        advantage: [B].
        valid: bool [B, T], the tokens that count.
    """
    references = torch.stack([old_log_prob.detach(), rollout_log_prob.detach()]).double()
    new = log_prob.detach().double()
    log_ratios = torch.where(valid, new - references, 0.0)
    statistics = _contributions(log_ratios, advantage.double())
    statistics["sum/tokens/all",] = valid.sum().double()[None]
    for policy, of_policy in zip(POLICIES, (references[0], new), strict=True):
        statistics |= _classes(policy, of_policy, log_ratios[0], advantage, valid)
    return statistics


def _contributions(log_ratios: torch.Tensor, advantage: torch.Tensor) -> Vectors:
    """Return sums of C(r) by sign, of K1 and of K3. `log_ratios`: FP64 [2, B, T], 0 where there is no token."""
    deviation = log_ratios.clamp(max=MAX_LOG_RATIO).expm1()
    contribution = -deviation.sum(-1) * advantage
    by_sign = (
        torch.where(advantage > 0, contribution, 0.0),
        torch.where(advantage < 0, contribution, 0.0),
    )
    sums = {
        **{f"centred_{sign}": values.sum(-1) for sign, values in zip(SIGNS, by_sign, strict=True)},
        "k1": -log_ratios.sum((1, 2)),
        "k3": (deviation - log_ratios).sum((1, 2)),
    }
    return {
        tuple(f"sum/{prefix}{name}" for prefix in REFERENCES): values
        for name, values in sums.items()
    }


def _classes(
    policy: str,
    of_policy: torch.Tensor,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    valid: torch.Tensor,
) -> Vectors:
    """Return number, sum and maximum of |log ratio|, and sum of the log ratio, of the tokens of each sign and class.

    `of_policy`: FP64 [B, T], the log-probs that choose the class of a token. Tokens with A = 0 are left out."""
    kind = torch.stack([of_policy > math.log(edge) for edge in BINS]).sum(0)
    first = torch.where(advantage > 0, 0, len(CLASSES))[:, None]
    counts = valid & (advantage != 0)[:, None]
    group_index = torch.where(counts, first + kind, len(_GROUPS)).flatten()
    size = log_ratio.abs().flatten()
    values = torch.stack([torch.ones_like(size), size, log_ratio.flatten()])
    # A product with zeros and ones: unlike index_add_ on GPUs, it sums in a fixed order.
    members = (
        group_index[:, None] == torch.arange(len(_GROUPS), device=group_index.device)
    ).double()
    largest = size.new_zeros(len(_GROUPS) + 1).scatter_reduce(0, group_index, size, "amax")
    keys = tuple(f"sum/{name}/{policy}{group}" for name in _SUMS for group in _GROUPS)
    largest_keys = tuple(f"max/moved/{policy}{group}" for group in _GROUPS)
    return {keys: (values @ members).flatten(), largest_keys: largest[:-1]}


def contribution_metrics(total: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics from combined statistics of `token_statistics`, or {} if there was no token.

    PREFIX is empty for the ratio to the old policy, and `rollout_` for the ratio to the rollout policy.
        actor/PREFIXzero_centred_loss_pos, _neg: C(r) = -(r - 1) A summed over the tokens with A > 0 (A < 0), divided by
            the number of all tokens (arXiv 2605.14220, equation 5)
        actor/PREFIXk1, actor/PREFIXk3: mean over all tokens of -log r, and of (r - 1) - log r, in nats
    """
    tokens = total.get("sum/tokens/all")
    if not tokens:
        return {}
    metrics = {}
    for prefix in REFERENCES:
        for sign in SIGNS:
            metrics[f"actor/{prefix}zero_centred_loss_{sign}"] = (
                total[f"sum/{prefix}centred_{sign}"] / tokens
            )
        for estimate in ("k1", "k3"):
            metrics[f"actor/{prefix}{estimate}"] = total[f"sum/{prefix}{estimate}"] / tokens
    return metrics


def class_metrics(total: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics from combined statistics of `token_statistics`. A sign without tokens is left out.

    SIGN is pos or neg. POLICY is empty for classes of the probability under the old policy, and `now_` for those under
    the current policy. CLASS is one of `CLASSES`. A token counts only in the first class that contains it.
        tokens/SIGN_POLICYCLASS_frac: share of the tokens of that sign
        tokens/SIGN_POLICYCLASS_moved_mean, _moved_max: |log ratio| of these tokens, current policy to old, in nats;
            left out if there are none
        tokens/SIGN_POLICYCLASS_drift: mean log ratio, negative if the tokens became less likely
    """
    metrics = {}
    for policy in POLICIES:
        for sign in SIGNS:
            counts = {
                label: total.get(f"sum/tokens/{policy}{sign}_{label}", 0.0) for label in CLASSES
            }
            for label, count in counts.items():
                name = f"tokens/{sign}_{policy}{label}"
                group = f"{policy}{sign}_{label}"
                if any(counts.values()):
                    metrics[f"{name}_frac"] = count / sum(counts.values())
                if count:
                    metrics[f"{name}_moved_mean"] = total[f"sum/moved/{group}"] / count
                    metrics[f"{name}_moved_max"] = total[f"max/moved/{group}"]
                    metrics[f"{name}_drift"] = total[f"sum/drift/{group}"] / count
    return metrics
