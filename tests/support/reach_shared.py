"""Rows of `test_config_reach*.py` that are the same in both backends."""

from __future__ import annotations

from typing import Any

import pytest
from reach_objectives import OBJECTIVES, OPEN, band, metric
from reach_rows import (
    SIGN,
    STEPS,
    Row,
    Table,
    adopts,
    before_update,
    cosine,
    each,
    forwards,
    lr_of_updates,
    moved,
    tensors_close,
    updates,
)


def widened(value: Any, **given: Any) -> Row:
    """Bands of 1e-4 leave many responses outside, and bands 1e4 times as wide at 16 tokens or fewer leave fewer."""
    observe = each(metric("actor/inside_band_frac"), metric("actor/grad_norm"))
    narrow = {key: 1e-4 for key in OPEN if key.startswith(("actor.seq", "actor.neg"))}
    return Row(value, observe, lambda b, a: b[0] < a[0] and b[1] != a[1], OPEN | narrow | given)


BY_TOKENS = {
    "actor.use_dynamic_bsz": True,
    "actor.ppo_micro_batch_size_per_gpu": None,
    "actor.log_prob_micro_batch_size_per_gpu": None,
    "actor.ppo_max_token_len_per_gpu": 200,
}
"""All rows of the run have fewer tokens, a mini-batch or a step. A row has 16 at most."""

SHARED: Table = OBJECTIVES | {
    "model.use_remove_padding": Row(False, lambda run: run.notes.batch_sizes, ({1}, {2, 4})),
    "actor.use_dynamic_bsz": Row(True, forwards("update"), ([2] * 4, [4] * 2), also=BY_TOKENS),
    "actor.ppo_max_token_len_per_gpu": Row(
        17, forwards("update"), lambda b, a: b == [4] * 2 and len(a) > 4 and sum(a) == 8, BY_TOKENS
    ),
    "actor.log_prob_max_token_len_per_gpu": Row(
        17, forwards("old_log_prob"), lambda b, a: b == [8] and len(a) > 4 and sum(a) == 8, BY_TOKENS
    ),
    "model.gradient_checkpointing": Row(True, lambda run: len(run.notes.forwards["update"]), (4, 8)),
    "actor.ppo_mini_batch_size": Row(4, updates, (2, 1)),
    "actor.ppo_micro_batch_size_per_gpu": Row(4, forwards("update"), ([2] * 4, [4] * 2)),
    "actor.log_prob_micro_batch_size_per_gpu": Row(8, forwards("old_log_prob"), ([4, 4], [8])),
    "actor.ppo_epochs": Row(2, updates, (2, 4)),
    "actor.grad_clip": Row(
        1e-3,
        lambda run: max(run.notes.norms),
        lambda b, a: b > 0.01 and a == pytest.approx(1e-3, rel=1e-2),
        {"actor.grad_clip": 1e9},
    ),
    "actor.seq_clip_ratio_high": band("seq_clip_ratio_high"),
    "actor.seq_clip_ratio_low": band("seq_clip_ratio_low", **{"actor.positive_band": "two_sided"}),
    "actor.neg_seq_clip_ratio_low": band("neg_seq_clip_ratio_low"),
    "actor.seq_tis_imp_ratio_cap": Row(
        1.05,
        each(metric("actor/seq_tis_above_cap_frac"), metric("actor/grad_norm")),
        lambda b, a: (b[0], a[0]) == (0, 0.5) and abs(a[1] / b[1] - 1) > 1e-3,
        stub={"noise": 0.1},
    ),
    "actor.mismatch_outside_cap": Row(
        "drop",
        metric("actor/grad_norm"),
        lambda b, a: b > 0 and a == 0,
        {"actor.seq_tis_imp_ratio_cap": 1.05},
        {"noise": 0.1},
    ),
    "actor.positive_band": band("positive_band", "two_sided", **{"actor.seq_clip_ratio_low": 1e-9}),
    "actor.band_scaling": widened("length", **{"actor.band_reference_length": 10**9}),
    "actor.band_reference_length": widened(10**9, **{"actor.band_scaling": "length", "actor.band_reference_length": 1}),
    "optim.lr": Row(2e-2, lr_of_updates, lambda b, a: adopts(b, a, [1, 1], [2, 2]), SIGN),
    "optim.eps": Row(1e3, lr_of_updates, lambda b, a: min(b) > 0.5 and 0 < max(a) < 1e-2),
    "optim.weight_decay": Row(
        0.5,
        each(moved(0), before_update),
        lambda b, a: tensors_close(a[0] - b[0], -1e-2 * 0.5 * b[1]) and float(b[1].abs().max()) > 0.01,
    ),
    "optim.lr_warmup_steps": Row(
        2, lambda run: lr_of_updates(run)[::2], lambda b, a: adopts(b, a, [1, 1, 1], [0, 0.5, 1]), SIGN | {STEPS: 3}
    ),
    "optim.lr_scheduler_type": Row(
        "cosine",
        lambda run: lr_of_updates(run)[::2],
        lambda b, a: adopts(b, a, [1, 1, 1], cosine(3, 0.1)),
        SIGN | {STEPS: 3, "optim.min_lr_ratio": 0.1},
    ),
    "optim.min_lr_ratio": Row(
        0.5,
        lambda run: lr_of_updates(run)[::2],
        lambda b, a: adopts(b, a, cosine(3, 0.0), cosine(3, 0.5)),
        SIGN | {STEPS: 3, "optim.lr_scheduler_type": "cosine"},
    ),
}
