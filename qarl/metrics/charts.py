"""The charts of a run: one table for the PNG files of `qarl.metrics.plots` and for report.html."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart of lines: metric -> label. A chart whose metrics were not logged is left out.

    `file`: name of its PNG; empty if only the report has it. `smooth`: each step is a faint line, and the trailing mean
    a bold one. `fraction`: the axis is from 0 to 1."""

    title: str
    unit: str
    lines: Mapping[str, str]
    file: str = ""
    log: bool = False
    smooth: bool = False
    fraction: bool = False


CHARTS = (
    Chart("Reward of sampled responses", "mean reward", {"critic/score/mean": "reward"}, file="reward", smooth=True),
    Chart("Held-out accuracy", "mean reward, greedy", {"val/accuracy": "accuracy"}, file="accuracy"),
    Chart(
        "Mismatch: k3 KL(rollout‖trainer)",
        "nats per token",
        {"mismatch/k3": "k3"},
        file="k3",
        log=True,
        smooth=True,
    ),
    Chart(
        "Mismatch: |δ| of the sampled tokens",
        "nats",
        {"mismatch/abs_max": "largest", "mismatch/abs_p99": "99%", "mismatch/abs_mean": "mean"},
        log=True,
    ),
    Chart(
        "Responses outside their band (no gradient)",
        "share of that sign",
        {"actor/pos_outside_band_frac_after_first": "A > 0", "actor/neg_outside_band_frac_after_first": "A < 0"},
        file="outside_band",
        smooth=True,
        fraction=True,
    ),
    Chart("Sequence ratios", "π / π_old", {"actor/seq_ratio_max": "largest", "actor/seq_ratio_min": "smallest"}),
    Chart("Gradient norm", "before clipping", {"actor/grad_norm": "norm"}, log=True),
    Chart(
        "Entropy",
        "nats per token",
        {"rollout/entropy": "rollout", "actor/entropy": "trainer"},
        file="entropy",
        smooth=True,
    ),
    Chart(
        "Responses with error tokens",
        "share of that sign",
        {
            "error_tokens/neg_repetitive_frac": "repetitive, A < 0",
            "error_tokens/pos_repetitive_frac": "repetitive, A > 0",
            "error_tokens/neg_garbled_frac": "garbled, A < 0",
            "error_tokens/pos_garbled_frac": "garbled, A > 0",
        },
        file="error_tokens",
        smooth=True,
        fraction=True,
    ),
    Chart(
        "Rejected by the correction",
        "share",
        {"correction/rejected_response_frac": "responses", "correction/rejected_token_frac": "tokens"},
        smooth=True,
    ),
    Chart(
        "Loss contribution C(r) = (1 - r) A",
        "by the sign of A",
        {"actor/zero_centred_loss_pos": "A > 0", "actor/zero_centred_loss_neg": "A < 0"},
        smooth=True,
    ),
    Chart("Response length", "tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
    Chart("Learning rate", "", {"actor/lr": "lr", "actor/muon_lr": "Muon's lr"}),
)
