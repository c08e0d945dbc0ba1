"""Whole runs with DAPO's remedies for long responses, also one in which nothing is left to train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from glossary import glossary_metrics

from qarl.trainer.loop import train

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]


def test_a_run_whose_responses_are_all_cut_off(tmp_path: Path) -> None:
    """Twelve tokens end no answer, so every response has the whole punishment and none is trained on."""
    settings = config(
        tmp_path,
        "name=cut",
        "data.train_batch_size=2",
        "rollout.n=3",
        "data.max_response_length=12",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=6",
        "actor.mask_truncated_responses=true",
        "reward.overlong_buffer_len=5",
        "reward.overlong_penalty_factor=0.5",
        "trainer.total_training_steps=2",
        "trainer.val_max_prompts=4",
    )
    train(settings)
    rows = [
        json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["overlong/masked_frac"] == row["overlong/penalty_frac"] == 1.0
        assert row["critic/score/mean"] == row["overlong/penalty_mean"] == -0.5
        assert row["actor/grad_norm"] == 0.0
        assert {*row} - glossary_metrics() <= {"step"}
    assert rows[0]["val/accuracy"] == 0.0
    assert (settings.run_dir / "export" / "model.safetensors").is_file()
