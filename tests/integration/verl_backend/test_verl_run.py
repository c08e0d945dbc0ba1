"""Whole verl runs of two steps on a CPU: Ray, an FSDP2 trainer and a vLLM server, once from our config and once from
verl's own command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bad_runs import row
from checkout import ROOT
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from metrics_table import misplaced
from random_models import save_random_model
from verl_runs import REWARD, run_quickstart, start

from qarl.checkpoint.model_files import linears_of, packed, read_tensors
from qarl.config.level import Level
from qarl.metrics.mismatch_limit import resolve_limit
from qarl.metrics.tracker import read_metrics
from qarl.quant import get_scheme

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(
        pa.Table.from_pylist([row(f"t{3 + i} t{20 + i} t{40 + i}") for i in range(16)]), path
    )
    return path


@needs_vllm_cpu
def test_a_run_from_our_config(tmp_path, model, data):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    changes = {
        "rollout.n": 2,
        "actor.ppo_micro_batch_size_per_gpu": 2,
        "actor.log_prob_micro_batch_size_per_gpu": 8,
        "reward.function": f"{reward}:length_reward",
        "trainer.val_max_prompts": 4,
    }
    run_dir = run_quickstart(tmp_path, model, data, changes)
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == [1, 2]
    for entry in steps:
        assert entry["mismatch/abs_max"] == 0
        # Learning rate 0, and the two passes batch differently: 8 responses and 2.
        assert entry["actor/seq_ratio_abs_dev_max"] <= 1e-5
        assert 0 < entry["critic/score/mean"] <= 1
        assert misplaced(entry.keys() - {"step"}, "verl") == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (
        summary["finished"] and summary["accuracy_after"] is not None and summary["failed"] is None
    )
    assert (run_dir / "verl.yaml").is_file() and (run_dir / "versions.json").is_file()
    # Without learning, the export of the end is the quantized start.
    scheme = get_scheme("w4a16", group_size=32)
    expected = dict(packed(read_tensors(model), scheme, linears_of(model, scheme, ["lm_head"])))
    exported = dict(read_tensors(Path(summary["checkpoint"])))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_two_ranks_with_micro_batches_by_tokens(tmp_path, model, data):
    """At learning rate 0 trainer and engine agree. Ratios stay 1, though rows fall into other packs in the update."""
    changes = {
        "rollout.n": 4,
        "actor.use_dynamic_bsz": "true",
        "actor.ppo_micro_batch_size_per_gpu": "null",
        "actor.log_prob_micro_batch_size_per_gpu": "null",
        "actor.ppo_max_token_len_per_gpu": 48,
        "actor.log_prob_max_token_len_per_gpu": 96,
        "trainer.n_gpus_per_node": 2,
        "trainer.val_before_train": "false",
        "trainer.save_final": "false",
    }
    run_dir = run_quickstart(tmp_path, model, data, changes)
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == [1, 2]
    for entry in steps:
        assert entry["mismatch/abs_max"] == 0
        assert entry["actor/seq_ratio_abs_dev_max"] == 0
        assert not any(
            "publish/delta" in name for name in entry
        )  # on a CPU each publish sends all tensors


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_experts_on_two_ranks_of_one_engine(tmp_path, experts, data, scheme):
    """Two workers share the engine, so `model` falls back to `linears`, and the actor replays the experts."""
    changes = {
        "rollout.n": 2,
        "actor.ppo_micro_batch_size_per_gpu": 2,
        "actor.log_prob_micro_batch_size_per_gpu": 4,
        "quant.scheme": scheme,
        "quant.ignore": '["lm_head","re:.*mlp[.]gate$"]',
        "trainer.n_gpus_per_node": 2,
        "rollout.tensor_model_parallel_size": 2,
        "trainer.val_before_train": "false",
        "optim.lr": 1e-3,
    }
    run_dir = run_quickstart(tmp_path, experts, data, changes)
    first, second = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    for entry in (first, second):
        limit = resolve_limit(None, Level.LINEARS, response_length=entry["response_length/mean"])
        assert 0 < entry["mismatch/abs_mean"] <= limit and entry["mismatch/over_limit"] == 0
        assert 0 <= entry["mismatch/other_experts_frac"] < 0.5
    assert not any(
        "publish/delta" in name for name in second
    )  # on a CPU each publish sends all tensors
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and Path(summary["checkpoint"]).is_dir()


@pytest.mark.slow
def test_a_verl_users_own_command_line(tmp_path, model, data):
    log = tmp_path / "verl.jsonl"
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"hydra.run.dir={tmp_path}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    script = ["bash", str(ROOT / "scripts" / "verl_command_line.sh")]
    start([*script, *overrides], PYTHON=sys.executable, VERL_FILE_LOGGER_PATH=str(log))
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/mismatch/abs_max"] == 0
        assert metrics["actor/seq_tis_above_cap_frac"] == 0
        assert not any(
            "publish/delta" in name for name in metrics
        )  # on a CPU each publish sends all tensors
