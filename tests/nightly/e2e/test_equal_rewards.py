"""Whole runs with one reward for all responses: the exported model is the quantized start, in every bit."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_runs import row
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from verl_runs import run_quickstart

from qarl.checkpoint.model_files import linears_of, packed, read_tensors
from qarl.metrics.tracker import read_metrics
from qarl.quant import get_scheme

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_w4a16_cpu, pytest.mark.timeout(900)]
REWARD = """
def always(data_source, solution_str, ground_truth, extra_info=None):
    return 0.7
"""


@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_equal_rewards_leave_every_weight_as_it_was(
    backend: str, estimator: str, tmp_path: Path
) -> None:
    model = save_random_model(tmp_path / "model")
    data = tmp_path / "train.parquet"
    pq.write_table(
        pa.Table.from_pylist([row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]), data
    )
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    changes = {
        "backend": backend,
        "algorithm.adv_estimator": estimator,
        "rollout.n": 8,
        "actor.ppo_micro_batch_size_per_gpu": 8,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "reward.function": f"{reward}:always",
        "optim.lr": 1e-2,
        "optim.weight_decay": 0.0,
        "trainer.val_before_train": False,
    }
    run_dir = run_quickstart(tmp_path, model, data, changes)
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["actor/grad_norm"] for entry in steps] == [0.0, 0.0]
    scheme = get_scheme("w4a16", group_size=32)
    expected = dict(packed(read_tensors(model), scheme, linears_of(model, scheme, ["lm_head"])))
    summary = json.loads((run_dir / "summary.json").read_text())
    exported = dict(read_tensors(Path(summary["checkpoint"])))
    assert exported.keys() == expected.keys()
    assert [
        name for name, tensor in exported.items() if not torch.equal(tensor, expected[name])
    ] == []
