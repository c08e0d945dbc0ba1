"""Dynamic sampling in whole runs: batches of groups that differ, δ = 0, and a resume behind a refill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from glossary import glossary_metrics
from safetensors.torch import load_file

from qarl.trainer.loop import train

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
KEYS = (
    "filter_groups.enable=true", "data.train_batch_size=3", "rollout.n=3", "actor.ppo_mini_batch_size=3",
    "actor.ppo_micro_batch_size_per_gpu=9", "actor.log_prob_micro_batch_size_per_gpu=9", "trainer.plots=false",
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1",
    "optim.lr_scheduler_type=constant",
)  # fmt: skip


def test_a_resume_goes_on_behind_the_prompts_of_a_refill(tmp_path: Path) -> None:
    """Four steps, and two and their continuation, draw the same prompts and end with the same weights."""
    whole = config(tmp_path, *KEYS, "name=whole", "trainer.total_training_steps=4")
    train(whole)
    train(config(tmp_path, *KEYS, "name=parts", "trainer.total_training_steps=2"))
    resumed = config(
        tmp_path,
        *KEYS,
        "name=resumed",
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/parts/checkpoints/step_2",
    )
    train(resumed)
    rows = [json.loads(line) for line in (whole.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["filter_groups/num_gen_batches"] for row in rows[:2]) > 1
    for row in rows:
        assert row["mismatch/abs_max"] == 0.0
        groups = 3 * row["filter_groups/num_gen_batches"]
        assert row["filter_groups/dropped"] == pytest.approx(1 - 3 / groups)
        zero = row["filter_groups/equal"] / 3
        assert row["actor/zero_advantage_frac"] == pytest.approx(zero)
    assert {*rows[0]} - glossary_metrics() <= {"step"}
    exports = [
        load_file(tmp_path / name / "export" / "model.safetensors") for name in ("whole", "resumed")
    ]
    assert exports[0].keys() == exports[1].keys()
    assert all(exports[0][name].equal(exports[1][name]) for name in exports[0])
    last = json.loads((resumed.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    for key in ("filter_groups/num_gen_batches", "filter_groups/score_mean", "critic/score/mean"):
        assert last[key] == rows[-1][key]
