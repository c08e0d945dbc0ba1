"""Whole runs on a CPU with an engine of its own: Ray, FSDP2 trainers and a vLLM server that never waits for them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bad_runs import row
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from metrics_table import misplaced
from random_models import save_random_model
from verl_runs import REWARD, run_quickstart

from qarl.checkpoint.model_files import read_tensors
from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [pytest.mark.slow, needs_w4a16_cpu, needs_vllm_cpu, pytest.mark.timeout(900)]

STEPS = 5


@pytest.mark.parametrize(("ranks", "mini_batches"), [(1, 1), (2, 2)])
def test_every_token_is_of_a_version_that_is_proved(
    tmp_path: Path, ranks: int, mini_batches: int
) -> None:
    """Long answers and large updates. Whether a publish interrupts an answer depends on the machine's speed."""
    model = save_random_model(tmp_path / "model")
    data = tmp_path / "train.parquet"
    rows = [row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), data)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    changes: dict[str, object] = {
        "rollout.n": 4,
        "data.max_response_length": 200,
        "actor.ppo_mini_batch_size": 4 // mini_batches,
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "actor.log_prob_micro_batch_size_per_gpu": 4,
        "actor.old_log_probs_sample": 1.0,
        "optim.lr": 3e-3,
        "reward.function": f"{reward}:length_reward",
        "trainer.val_before_train": "false",
        "trainer.total_training_steps": STEPS,
        "trainer.n_gpus_per_node": ranks,
    }
    run_dir = run_quickstart(tmp_path, model, data, changes, config="quickstart_async")
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        assert entry["staleness/checked_frac"] == 1.0
        assert entry["mismatch/of_version_abs_max"] == 0.0
        assert entry["mismatch/over_limit"] == 0.0
        assert entry["staleness/age_max"] <= 1.0
        if mini_batches == 1:  # else verl takes the mean of the mini-batches' means
            # The whole mismatch of a token is its staleness, because the other part is 0.
            ratio = entry["staleness/ratio_abs_mean"]
            assert entry["mismatch/abs_mean"] == pytest.approx(ratio, rel=1e-4)
        assert misplaced(entry.keys() - {"step"}, "verl") == []
    assert steps[0]["staleness/age_max"] == 0.0
    # The first step dispatches two batches of the same weights; otherwise the run was synchronous.
    assert max(entry["staleness/age_max"] for entry in steps) == 1.0
    assert max(entry["staleness/ratio_abs_mean"] for entry in steps) > 1e-3
    assert [entry["publish/delta"] for entry in steps] == [0.0] + [1.0] * (STEPS - 1)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["failed"] is None
    assert dict(read_tensors(Path(summary["checkpoint"])))
