"""Every metric of a local step from its recorded batch, by docs/lookup/glossary.md's definitions, in Python's floats.

`formulas` returns the value of every metric of a step. A metric without a formula is an error of the test, so a new
metric needs one here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from papers_losses import kept_tokens, tbpo_band
from twin_maths import rate_factor, total_norm

Numbers = list[float]
MEASURED = (
    "timing_s/",
    "publish/prepare_s",
    "publish/quantize_s",
    "publish/pack_s",
    "publish/validate_s",
    "publish/apply_s",
)
"""Beginnings of the names of seconds."""
CLASSES = {"tail": (0.0, 1e-3), "rare": (1e-3, 1e-2), "unlikely": (1e-2, 1e-1), "likely": (0.1, 2)}
BINS = {
    "to_50": 0.5, "to_80": 0.8, "to_95": 0.95, "to_99": 0.99, "to_101": 1.01, "to_105": 1.05,
    "to_125": 1.25, "to_200": 2.0, "above_200": math.inf,
}  # fmt: skip


@dataclass
class Seen:
    """A response in an update. `new`, `old`, `rollout`: the log-probs of the tokens that are not rejected. `weights`:
    those of these tokens."""

    update: int
    advantage: float
    length: int
    new: Numbers
    old: Numbers
    rollout: Numbers
    weights: Numbers

    def ratio(self, reference: str = "old") -> float:
        """The geometric mean of the tokens' ratios."""
        differences = self.log_ratios(reference)
        return math.exp(fmean(differences))

    def log_ratios(self, reference: str = "old") -> Numbers:
        return [a - b for a, b in zip(self.new, getattr(self, reference), strict=True)]


def share(values: Sequence[Any]) -> float | None:
    return sum(map(bool, values)) / len(values) if values else None


def quantile(values: Numbers, q: float) -> float | None:
    """With linear interpolation between order statistics."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def formulas(config: Any, step: Any, keys: dict[str, Any], weights: list[torch.Tensor]) -> Any:
    """Name -> value; None for a metric that must be missing. `step`: `twin_run.Step`. `keys`: `resolved_keys`."""
    seen = responses_seen(config, step, weights)
    found: dict[str, float | None] = {}
    found |= of_rollout(config, step)
    found |= of_text(step, vocabulary=64)
    found |= of_mismatch(config, step)
    found |= of_every_loss(config, seen)
    later = [response for response in seen if response.update]
    found |= of_token_classes(later)
    if config.actor.loss == "tbpo":
        found |= of_tbpo(seen, keys)
        about_bands = ("_band_frac", "band_p95", "band_factor_p95")
        for name, value in of_tbpo(later, keys).items():
            if name.endswith(about_bands):
                found[f"{name}_after_first"] = value
    else:
        found |= of_other_losses(config, seen, later, keys)
    found |= of_correction(config, step, seen)
    found |= of_update(config, step)
    return found


def responses_seen(config: Any, step: Any, weights: list[torch.Tensor]) -> list[Seen]:
    """The responses of all updates that have a token left."""
    correction = config.rollout_correction.model_dump()
    seen = []
    for index, update in enumerate(step.updates):
        for forward in update.forwards:
            for place, row in enumerate(forward.rows):
                mask = step.batch.response_mask[row]
                if not mask.any():
                    continue
                new = forward.log_probs[place][mask].double()
                old = step.old[row][mask].double()
                rollout = step.batch.rollout_log_probs[row][mask].double()
                keep = kept_tokens(new, old, rollout, correction)
                if not keep.any():
                    continue
                advantage = float(step.batch.advantages[row])
                chosen = [values[keep].tolist() for values in (new, old, rollout, weights[row])]
                seen.append(Seen(index, advantage, int(keep.sum()), *chosen))
    return seen


def of_rollout(config: Any, step: Any) -> dict[str, float | None]:
    lengths = [len(response) for response in step.responses]
    rewards = [reward for reward, length in zip(step.rewards, lengths, strict=True) if length]
    log_probs = [value for row in step.logged for value in row]
    return {
        "critic/score/mean": mean(rewards),
        "critic/score/max": max(rewards),
        "critic/score/min": min(rewards),
        "critic/score/std": pstdev(rewards),
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/min": min(lengths),
        "response_length/clip_ratio": share([reason == "length" for reason in step.reasons]),
        "response/aborted_ratio": share([not length for length in lengths]),
        "rollout/entropy": -fmean(log_probs),
        "rollout/preemptions": 0.0,
    }


def of_text(step: Any, vocabulary: int) -> dict[str, float | None]:
    """docs/do/troubleshooting.md, "Error tokens". At least ten 6-grams are judged."""
    limit = max(math.log(0.01), -0.7 * math.log(vocabulary))
    judged = []
    for tokens, logged, advantage in zip(
        step.responses, step.logged, step.batch.advantages.tolist(), strict=True
    ):
        if not tokens:
            continue
        tail = tokens[-256:]
        grams = [tuple(tail[i : i + 6]) for i in range(len(tail) - 5)]
        repeats = sum(count - 1 for count in Counter(grams).values())
        repeated = repeats / len(grams) if len(grams) >= 10 else 0.0
        runs = [fmean(logged[i : i + 8]) for i in range(len(logged) - 7)]
        judged.append((advantage, repeated, any(run < limit for run in runs)))
    found = {}
    groups: dict[str, Callable[[float], bool]] = {
        "": lambda a: True,
        "pos_": lambda a: a > 0,
        "neg_": lambda a: a < 0,
    }
    for prefix, belongs in groups.items():
        group = [response for response in judged if belongs(response[0])]
        found[f"error_tokens/{prefix}repetition"] = mean([repeated for _, repeated, _ in group])
        found[f"error_tokens/{prefix}repetitive_frac"] = share([r >= 0.5 for _, r, _ in group])
        found[f"error_tokens/{prefix}garbled_frac"] = share([garbled for *_, garbled in group])
    return found


def of_mismatch(config: Any, step: Any) -> dict[str, float | None]:
    rows = []
    for own, logged, known in zip(
        step.measured.log_probs.tolist(), step.logged, step.measured.known.tolist(), strict=True
    ):
        if known and logged:
            rows.append([(a, b) for a, b in zip(own, logged, strict=False)])
    tokens = [pair for row in rows for pair in row]
    deltas = [a - b for a, b in tokens]
    sizes = [abs(delta) for delta in deltas]
    of_rows = [fmean(a - b for a, b in row) for row in rows]
    truncated = [min(math.exp(delta), 2.0) for delta in deltas]
    found = {
        "mismatch/abs_mean": mean(sizes),
        "mismatch/abs_max": max(sizes),
        "mismatch/abs_p50": quantile(sizes, 0.5),
        "mismatch/abs_p90": quantile(sizes, 0.9),
        "mismatch/abs_p99": quantile(sizes, 0.99),
        "mismatch/abs_p999": quantile(sizes, 0.999),
        "mismatch/k1": -fmean(deltas),
        "mismatch/k3": fmean(math.exp(delta) - delta - 1 for delta in deltas),
        "mismatch/ess": fmean(truncated) ** 2 / fmean(w * w for w in truncated),
        "mismatch/training_ppl": fmean(math.exp(-fmean(a for a, _ in row)) for row in rows),
        "mismatch/ppl_ratio": fmean(math.exp(-delta) for delta in of_rows),
        "mismatch/pearson": pearson(
            [math.exp(a) for a, _ in tokens], [math.exp(b) for _, b in tokens]
        ),
        "mismatch/over_limit": float(fmean(sizes) > config.quant.mismatch_limit),
        "old_log_probs/checked_frac": share(step.measured.known.tolist()),
    }
    low = 0.0
    for name, high in BINS.items():
        found[f"mismatch/w_{name}"] = share([low < math.exp(delta) <= high for delta in of_rows])
        low = high
    return found


def pearson(first: Numbers, second: Numbers) -> float:
    a, b = fmean(first), fmean(second)
    product = sum((x - a) * (y - b) for x, y in zip(first, second, strict=True))
    return product / math.sqrt(sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second))


def of_every_loss(config: Any, seen: list[Seen]) -> dict[str, float | None]:
    """`actor/seq_ratio_*` are of the ratio in the loss."""
    ratios = [response.ratio(in_the_loss(config)) for response in seen]
    found = {
        "actor/zero_advantage_frac": share([not response.advantage for response in seen]),
        "actor/seq_ratio_mean": mean(ratios),
        "actor/seq_ratio_min": min(ratios),
        "actor/seq_ratio_max": max(ratios),
        "actor/seq_ratio_abs_dev_max": max(abs(ratio - 1) for ratio in ratios),
        "actor/update_size": largest_move(seen, "old"),
    }
    for prefix, reference in (("", "old"), ("rollout_", "rollout")):
        tokens = [
            (log_ratio, response.advantage)
            for response in seen
            for log_ratio in response.log_ratios(reference)
        ]
        for sign, factor in (("pos", 1), ("neg", -1)):
            terms = [-(math.exp(d) - 1) * a for d, a in tokens if a * factor > 0]
            found[f"actor/{prefix}zero_centred_loss_{sign}"] = sum(terms) / len(tokens)
        found[f"actor/{prefix}k1"] = fmean(-d for d, _ in tokens)
        found[f"actor/{prefix}k3"] = fmean(math.exp(d) - 1 - d for d, _ in tokens)
    return found


def in_the_loss(config: Any) -> str:
    """The policy that the ratio of the loss is to."""
    return "rollout" if config.rollout_correction.bypass_mode else "old"


def largest_move(seen: list[Seen], reference: str) -> float:
    return max(abs(r.ratio(reference) - 1) * math.sqrt(r.length) for r in seen)


def of_token_classes(later: list[Seen]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for sign, factor in (("pos", 1), ("neg", -1)):
        tokens = [
            (old, new)
            for response in later
            if response.advantage * factor > 0
            for old, new in zip(response.old, response.new, strict=True)
        ]
        for policy, index in (("", 0), ("now_", 1)):
            for name, (low, high) in CLASSES.items():
                chosen = [pair for pair in tokens if low <= math.exp(pair[index]) < high]
                moves = [new - old for old, new in chosen]
                prefix = f"tokens/{sign}_{policy}{name}"
                found[f"{prefix}_frac"] = len(chosen) / len(tokens) if tokens else None
                found[f"{prefix}_moved_mean"] = mean([abs(move) for move in moves])
                found[f"{prefix}_moved_max"] = max(map(abs, moves), default=None)
                found[f"{prefix}_drift"] = mean(moves)
    return found


def of_tbpo(seen: list[Seen], keys: dict[str, Any]) -> dict[str, float | None]:
    outside: dict[str, list[bool]] = {"pos": [], "neg": []}
    scaled: Numbers = []
    factors: Numbers = []
    for response in seen:
        if not response.advantage:
            continue
        distance = response.ratio() - 1
        below, above = tbpo_band(response.advantage, response.length, keys)
        sign = "pos" if response.advantage > 0 else "neg"
        outside[sign].append(not -below <= distance <= above)
        scaled.append(abs(distance) * math.sqrt(response.length / keys["band_reference_length"]))
        factors.append(distance / above if distance > 0 else -distance / below)
    everyone = outside["pos"] + outside["neg"]
    weights = [math.exp(fmean(a - b for a, b in zip(r.old, r.rollout, strict=True))) for r in seen]
    cap = keys["seq_tis_imp_ratio_cap"]
    return {
        "actor/pos_outside_band_frac": share(outside["pos"]),
        "actor/neg_outside_band_frac": share(outside["neg"]),
        "actor/inside_band_frac": share([not far for far in everyone]),
        "actor/band_p95": quantile(scaled, 0.95),
        "actor/band_factor_p95": quantile(factors, 0.95),
        "actor/seq_tis_imp_ratio_mean": mean(weights),
        "actor/seq_tis_imp_ratio_max": max(weights, default=None),
        "actor/seq_tis_above_cap_frac": share([w > cap for w in weights]),
        "actor/seq_tis_below_cap_frac": share([w < 1 / cap for w in weights]),
    }


def of_other_losses(
    config: Any, seen: list[Seen], later: list[Seen], keys: dict[str, Any]
) -> dict[str, float | None]:
    loss = config.actor.loss
    reference = in_the_loss(config)
    moves = [d for response in seen for d in response.log_ratios(reference)]
    found: dict[str, float | None] = {"actor/ppo_kl": -fmean(moves)}
    if loss == "reinforce":
        return found
    found["actor/ratio_size"] = largest_move(seen, reference)
    for suffix, responses in (("", seen), ("_after_first", later)):
        clipped: list[bool] = []
        third: list[bool] = []
        for response in responses:
            for log_ratio in response.log_ratios(reference):
                ratio = math.exp(log_ratio)
                if loss in ("gspo", "mis_gspo"):
                    ratio = response.ratio(reference)
                states = clipping(loss, ratio, response.advantage, keys)
                clipped.append(states[0])
                third.append(states[1])
        found[f"actor/pg_clipfrac{suffix}"] = share(clipped)
        found[f"actor/pg_clipfrac_lower{suffix}"] = share(third)
    return found


def clipping(loss: str, ratio: float, a: float, keys: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a token's ratio is clipped, and whether dual clip's third bound holds."""
    if loss == "sapo":
        return False, False
    high, low = 1 + keys["clip_ratio_high"], 1 - keys["clip_ratio_low"]
    clipped = ratio > high if a > 0 else ratio < low and a < 0
    return clipped, loss == "dual_clip" and a < 0 and ratio > keys["clip_ratio_c"]


def of_correction(config: Any, step: Any, seen: list[Seen]) -> dict[str, float | None]:
    correction = config.rollout_correction
    mis = config.actor.loss == "mis_gspo"
    found: dict[str, float | None] = {}
    filled = step.batch.response_mask.any(1)
    passes = len(step.updates) * config.actor.ppo_mini_batch_size * config.rollout.n / len(filled)
    if correction.rejects or correction.rollout_is or mis:
        responses = passes * int(filled.sum())
        tokens = passes * int(step.batch.response_mask.sum())
        left = sum(response.length for response in seen)
        found["correction/rejected_response_frac"] = 1 - len(seen) / responses
        found["correction/rejected_token_frac"] = 1 - left / tokens
    if correction.rollout_is or mis:
        weights = [weight for response in seen for weight in response.weights]
        square = fmean(w * w for w in weights)
        found |= {
            "correction/weight_mean": mean(weights),
            "correction/weight_min": min(weights),
            "correction/weight_max": max(weights),
            "correction/weight_zero_frac": share([not weight for weight in weights]),
            "correction/weight_ess": fmean(weights) ** 2 / square if square else None,
        }
    return found


def of_update(config: Any, step: Any) -> dict[str, float | None]:
    total = config.trainer.total_training_steps
    factor = rate_factor(config.optim, step.number, total)
    norms = [total_norm(update.gradients) / update.scale for update in step.updates]
    finite = [norm for norm in norms if math.isfinite(norm)]
    losses = [sum(forward.loss for forward in update.forwards) for update in step.updates]
    sent = step.adapter["tensors"] if step.adapter else step.sent
    layers = {name.rpartition(".")[0] for name in step.sent if name.endswith("weight_scale")}
    low_bit = sum(
        tensor.nbytes
        for name, tensor in step.sent.items()
        if name.rpartition(".")[0] in layers and not name.endswith(".bias")
    )
    found: dict[str, float | None] = {
        "actor/lr": config.optim.lr * factor,
        "actor/grad_norm": mean(finite if config.model.dtype == "fp16" else norms),
        "actor/skipped_steps": len(norms) - len(finite),
        "publish/mbytes": sum(tensor.nbytes for tensor in sent.values()) / 1e6,
        "publish/rebuilds": 0,
    }
    whole = 2 * sum(math.prod(step.shapes[f"{layer}.weight"]) for layer in layers)
    found["publish/quantized_ratio"] = low_bit / whole if layers and not step.adapter else 1.0
    if config.optim.name == "muon":
        found["actor/muon_lr"] = config.optim.muon_lr * factor
    recomputed = config.actor.old_log_probs != "rollout"
    found |= {
        "actor/pg_loss": mean(losses),
        "old_log_probs/recomputed": float(recomputed or not step.number),
        "old_log_probs/from_rollout": float(not recomputed),
        "old_log_probs/fallback": 0.0,
    }
    if config.actor.use_kl_loss:
        found["actor/kl_loss"] = mean(step.kl)
    return found
