"""A whole run with several reward functions: each is logged, in steps and evaluations, beside their weighted sum."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config
from glossary import glossary_metrics

from qarl.metrics.tracker import read_metrics
from qarl.trainer.loop import train

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]
FILE = """
async def all_lengths(solution_strs, **others):
    return [len(text) for text in solution_strs]

def digits(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter.isdigit() for letter in solution_str)
"""


def test_two_steps(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(FILE)
    functions = (
        f"[{{function: arithmetic, weight: 2}}, {{function: '{own}:digits', weight: -0.5, name: numbers}}, "
        f"{{function: '{own}:all_lengths', weight: 0}}]"
    )
    settings = config(
        tmp_path,
        "name=several",
        "data.train_batch_size=2",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=1",
        "actor.ppo_micro_batch_size_per_gpu=4",
        f"reward.functions={functions}",
        "filter_groups.enable=true",
        "filter_groups.max_num_gen_batches=2",
        "trainer.total_training_steps=2",
        "trainer.val_max_prompts=4",
        "trainer.save_final=false",
    )
    train(settings)
    rows = read_metrics(settings.run_dir)
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["mismatch/abs_max"] == 0.0
        parts = [row[f"rewards/{name}/mean"] for name in ("arithmetic", "numbers", "all_lengths")]
        total = 2 * parts[0] - 0.5 * parts[1]
        assert row["critic/score/mean"] == pytest.approx(total, abs=1e-5)  # FP32 rewards
        assert parts[2] > parts[1] >= 0
    val = rows[0]
    total = 2 * val["val/rewards/arithmetic/mean"] - 0.5 * val["val/rewards/numbers/mean"]
    assert val["val/accuracy"] == pytest.approx(total, abs=1e-9)
    unknown = {*steps[0]} - glossary_metrics() - {"step"}
    assert all(name.startswith(("rewards/", "val/")) for name in unknown)
