"""Publishes to a running vLLM with two workers, dense and experts, in every scheme."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu
from random_models import save_random_model
from random_moe import save_random_moe

pytestmark = [pytest.mark.vllm, needs_w4a16_cpu]
MODELS = {
    "dense": lambda folder: save_random_model(
        folder, initializer_range=0.08, intermediate_size=128
    ),
    "experts": save_random_moe,
}


@pytest.mark.parametrize("name", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_two_workers_hold_what_was_published(model: str, name: str, tmp_path: Path) -> None:
    folder = MODELS[model](tmp_path / "model")
    program = [sys.executable, str(ROOT / "tests/support/two_workers.py"), str(folder), name]
    run = subprocess.run(program, capture_output=True, text=True, timeout=550)
    assert "EXACT" in run.stdout, run.stderr[-3000:]
