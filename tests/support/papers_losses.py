"""The objectives and corrections in float64, response by response, from the formulas of their papers.

r_t: ratio of a token to the old policy. s: its geometric mean over the response. d_t: log of r_corr, the trainer's old
probability over the rollout's. A correction is a dict of the keys of the section `rollout_correction`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Rows = dict[str, torch.Tensor]
PAPER_CLIP = {"gspo": (3e-4, 4e-4), "mis_gspo": (3e-4, 4e-4)}


def resolved_keys(config: Any) -> dict[str, Any]:
    """The keys of the section actor, with the papers' values in the place of null."""
    keys: dict[str, Any] = config.actor.model_dump() | {
        "max_response_length": config.data.max_response_length
    }
    low, high = PAPER_CLIP.get(config.actor.loss, (0.2, 0.2))
    keys["clip_ratio_low"] = low if keys["clip_ratio_low"] is None else keys["clip_ratio_low"]
    keys["clip_ratio_high"] = high if keys["clip_ratio_high"] is None else keys["clip_ratio_high"]
    return keys


def paper_loss(
    loss: str,
    rows: Rows,
    keys: dict[str, Any],
    correction: dict[str, Any],
    weights: list[torch.Tensor] | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient, [B, T] float64, of a whole mini-batch. `keys`: of the section `actor`, without nulls.
    `weights`: `all_weights` of a batch that has more rows than the mini-batch, or None."""
    log_prob = rows["log_prob"].detach().double().requires_grad_()
    weights = all_weights(rows, correction) if weights is None else weights
    per_response = []
    tokens = [row.nonzero().flatten() for row in rows["response_mask"]]
    for i, where in enumerate(tokens):
        if not len(where):
            continue
        new = log_prob[i][where]
        old, rollout = (
            rows[name][i][where].double() for name in ("old_log_prob", "rollout_log_prob")
        )
        advantage = float(rows["advantages"][i])
        keep = kept_tokens(new.detach(), old, rollout, correction)
        if not keep.any():
            continue
        weight = (
            mis_weight(old - rollout, keys["mis_imp_ratio_cap"])
            if loss == "mis_gspo"
            else weights[i][keep]
        )
        if correction.get("bypass_mode"):
            old = rollout
        losses = token_losses(loss, new[keep], old[keep], rollout[keep], advantage, keys)
        per_response.append((losses * weight, int(keep.sum())))
    count, all_tokens = sum(len(where) > 0 for where in tokens), sum(len(where) for where in tokens)
    total = (
        log_prob.sum() * 0.0 if not log_prob.isnan().any() else torch.zeros((), dtype=torch.float64)
    )
    for losses, length in per_response:
        total = (
            total
            + {
                "seq-mean-token-mean": losses.sum() / length / count,
                "seq-mean-token-sum": losses.sum() / count,
                "seq-mean-token-sum-norm": losses.sum() / count / keys["max_response_length"],
                "token-mean": losses.sum() / all_tokens,
            }[keys["loss_agg_mode"]]
        )
    if not total.requires_grad:
        return float(total), torch.zeros_like(log_prob)
    (gradient,) = torch.autograd.grad(total, log_prob)
    return total.item(), gradient


def token_losses(
    loss: str,
    new: torch.Tensor,
    old: torch.Tensor,
    rollout: torch.Tensor,
    a: float,
    keys: dict[str, Any],
) -> torch.Tensor:
    """The loss of each token of a response; where the response has a single one, each token has that."""
    r, s = (new - old).exp(), (new - old).mean().exp().expand(len(new))
    low, high = 1 - keys["clip_ratio_low"], 1 + keys["clip_ratio_high"]
    if loss == "tbpo":
        w = tbpo_weight(float((old - rollout).mean().exp()), keys)
        below, above = tbpo_band(a, len(new), keys)
        return -w * s.clamp(1 - below, 1 + above) * a
    if loss == "positive_only" and a < 0:
        return 0 * r
    if loss in ("gspo", "mis_gspo"):
        # GSPO-token (section 4.3): with one weight per response it is GSPO, with a weight per token each token has its.
        s = s.detach() * (new - new.detach()).exp()
        return -torch.minimum(s * a, s.clamp(low, high) * a)
    if loss == "sapo":
        tau = keys["tau_pos"] if a > 0 else keys["tau_neg"]
        return -4 / tau / (1 + (-tau * (r - 1)).exp()) * a
    if loss == "reinforce":
        return -new * a
    clipped = -torch.minimum(r * a, r.clamp(low, high) * a)
    return (
        clipped.clamp(max=-keys["clip_ratio_c"] * a) if loss == "dual_clip" and a < 0 else clipped
    )


def tbpo_weight(w: float, keys: dict[str, Any]) -> float:
    """arXiv 2604.07853, section 3.2: the weight in [1/C, C], or 0 outside of it with `drop`."""
    cap = keys["seq_tis_imp_ratio_cap"]
    inside = min(max(w, 1 / cap), cap)
    return 0.0 if keys["mismatch_outside_cap"] == "drop" and inside != w else inside


def tbpo_band(a: float, tokens: int, keys: dict[str, Any]) -> tuple[float, float]:
    """How far the ratio of a response of `tokens` tokens may be below and above 1."""
    below, above = keys["neg_seq_clip_ratio_low"], keys["neg_seq_clip_ratio_high"]
    if a >= 0:
        two_sided = keys["positive_band"] == "two_sided"
        below = keys["seq_clip_ratio_low"] if two_sided else math.inf
        above = keys["seq_clip_ratio_high"]
    wider = 1.0
    if keys["band_scaling"] == "length":
        wider = math.sqrt(keys["band_reference_length"] / tokens)
    return below * wider, above * wider


def mis_weight(d: torch.Tensor, cap: float) -> float:
    product = float(d.sum().exp())
    return product if product <= cap else 0.0


def all_weights(rows: Rows, correction: dict[str, Any]) -> list[torch.Tensor]:
    """Of each response the weights of its tokens; 1 if nothing is weighted."""
    mask = rows["response_mask"]
    level = correction.get("rollout_is")
    if level is None:
        return [torch.ones(int(row.sum()), dtype=torch.float64) for row in mask]
    upper = correction.get("rollout_is_threshold", 2.0)
    lower = correction.get("rollout_is_threshold_lower", 1 / upper)
    rows_of_weights = []
    for i, row in enumerate(mask):
        d = (rows["old_log_prob"][i].double() - rows["rollout_log_prob"][i].double())[row]
        w = {
            "token": d.exp(),
            "sequence": d.sum().exp().expand(len(d)),
            "geometric": d.mean().exp().expand(len(d)) if len(d) else d,
        }[level]
        w = {
            "truncate": w.clamp(max=upper),
            "clip": w.clamp(lower, upper),
            "mask": torch.where(w <= upper, w, 0.0),
            "icepop": torch.where((w >= lower) & (w <= upper), w, 0.0),
        }[correction.get("rollout_is_mode", "truncate")]
        rows_of_weights.append(w)
    if correction.get("rollout_is_batch_normalize"):
        full = [w for w in rows_of_weights if len(w)]
        mean = (
            torch.cat(full).mean() if level == "token" else torch.stack([w[0] for w in full]).mean()
        )
        rows_of_weights = [w / mean for w in rows_of_weights]
    return rows_of_weights


def kept_tokens(
    new: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, correction: dict[str, Any]
) -> torch.Tensor:
    """Which tokens of a response are left, bool [tokens]."""
    keep = torch.ones(len(new), dtype=torch.bool)
    log_r = (new if correction.get("rollout_rs_ratio") == "ppo" else old) - rollout
    options, bounds = correction.get("rollout_rs", []), correction.get("rollout_rs_threshold", [])
    for j, option in enumerate(options):
        bound = bounds[j] if len(bounds) > 1 else bounds[0]
        k = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[option[-2:]]
        level = option.rpartition("_")[0]
        if level != "token":
            k = {"seq_sum": k.sum(), "seq_mean": k.mean(), "seq_max": k.max()}[level].expand(
                len(new)
            )
        lower = correction.get("rollout_rs_threshold_lower")
        keep &= (k <= bound) & (
            k >= (lower if lower is not None and option.endswith("k1") else -math.inf)
        )
    veto = correction.get("veto_threshold")
    if veto is not None and bool((old.exp() < veto).any()):
        keep[:] = False
    return keep
