"""Section 4.1 of arXiv 2605.14220 token by token, in Python's own floats: C(r) of equation 5, K1 and K3."""

from __future__ import annotations

import math
from typing import Any


def paper_metrics(
    log_prob: Any, old_log_prob: Any, rollout_log_prob: Any, advantages: Any, response_mask: Any
) -> dict[str, float]:
    """The metrics of a batch by their formulas. All arguments are [B, T], but `advantages` is [B]."""
    references = {"": old_log_prob.tolist(), "rollout_": rollout_log_prob.tolist()}
    new, advantage, mask = log_prob.tolist(), advantages.tolist(), response_mask.tolist()
    metrics = {}
    for prefix, reference in references.items():
        contributions: dict[str, list[float]] = {"pos": [], "neg": []}
        k1: list[float] = []
        k3: list[float] = []
        for i, row in enumerate(mask):
            for t, present in enumerate(row):
                if not present:
                    continue
                ratio = math.exp(new[i][t] - reference[i][t])
                k1.append(-math.log(ratio))
                k3.append((ratio - 1) - math.log(ratio))
                if advantage[i] != 0:
                    contributions["pos" if advantage[i] > 0 else "neg"].append(
                        -(ratio - 1) * advantage[i]
                    )
        for sign, terms in contributions.items():
            metrics[f"actor/{prefix}zero_centred_loss_{sign}"] = sum(terms) / len(k1)
        metrics[f"actor/{prefix}k1"] = sum(k1) / len(k1)
        metrics[f"actor/{prefix}k3"] = sum(k3) / len(k3)
    return metrics
