"""Two steps of the config of Qwen3-30B-A3B in verl, on two CPU ranks, with a tiny mixture of experts as its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

from qarl.config import load_config
from qarl.metrics.mismatch_limit import resolve_limit
from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL, DATA = "models/tiny-qwen3-moe", "data/column_addition"
CONFIG = "config=qwen3_30b_w4a16.yaml"
REPLACED = [
    f"model.path={MODEL}",
    "quant.group_size=32",  # the tiny experts are 192 wide
    f"data.train_files=[{DATA}/train.parquet]",
    f"data.val_files=[{DATA}/test.parquet]",
    "data.max_prompt_length=32",
    "data.max_response_length=80",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    # The rest only saves time: 128 responses a step.
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=8",
    "trainer.val_max_prompts=32",
]


@pytest.mark.parametrize("changes", [[], ["quant.scheme=w8a8", "quant.align=model"]], ids=["as it is", "w8a8"])
def test_the_config_of_the_large_mixture_trains_a_tiny_one(changes: list[str], tmp_path: Path) -> None:
    """Two workers share its engine, so `model` falls back to `linears`."""
    if not (ROOT / MODEL).is_dir():
        pytest.skip("make model-moe makes it")
    command = [sys.executable, "-m", "qarl.train", CONFIG, *REPLACED, *changes, f"output_dir={tmp_path}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert ("quant.align=model falls back to linears" in run.stderr) == bool(changes)
    run_dir = tmp_path / "qwen3_30b_w4a16"
    steps = [entry for entry in read_metrics(run_dir) if entry["step"] > 0]
    assert [entry["step"] for entry in steps] == [1, 2]
    for entry in steps:
        limit = resolve_limit(None, "linears", response_length=entry["response_length/mean"])
        assert 0 < entry["mismatch/abs_mean"] <= limit and entry["mismatch/over_limit"] == 0
        assert 0 <= entry["mismatch/other_experts_frac"] < 0.5
    # A step logs the publish before its rollout: all tensors before the first, then changes.
    first, second = steps
    assert [first["publish/delta"], second["publish/delta"]] == [0, 1]
    assert second["publish/changed_words"] > 0
    assert 0 < second["publish/mbytes"] < first["publish/mbytes"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["failed"] is None and Path(summary["checkpoint"]).is_dir()


def test_everything_else_is_the_files() -> None:
    replaced = {item.partition("=")[0] for item in REPLACED}
    ours, files = (flat(load_config([CONFIG, *given]).model_dump()) for given in (REPLACED, []))
    assert {key for key in files if ours[key] != files[key]} == replaced


def flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
