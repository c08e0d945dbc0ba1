"""Whole runs under TRL on a real vLLM: the example, TRL's own losses, a resume, two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import trl_cpu

pytestmark = pytest.mark.vllm

SHORT: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 24,
    "logging_steps": 1,
}


@pytest.fixture(scope="module", autouse=True)
def small_runs(pristine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of a random model."""
    data = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"t3 t{i}", "reward_model": {"ground_truth": f"t{i}"}} for i in range(4, 60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = dict(trl_cpu.SETTINGS)
    trl_cpu.SETTINGS.update(SHORT, model=str(pristine_model), data=str(data))
    yield
    trl_cpu.SETTINGS.clear()
    trl_cpu.SETTINGS.update(before)


def test_a_run_has_no_mismatch_and_moves_the_weights() -> None:
    (found,) = trl_cpu.run({"max_steps": 3, "gradient_checkpointing": True})
    assert found["level"] == "model" and len(set(found["digests"].values())) > 1
    assert [one["mismatch/abs_max"] for one in found["history"]] == [0.0, 0.0, 0.0]
    assert all("actor/inside_band_frac" in one and "entropy" in one for one in found["history"])
    assert found["history"][0]["publish/mbytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kernels"), [("w4a8", "qarl"), ("w4a16", "dequantized")])
def test_own_kernels_have_no_mismatch(scheme: str, kernels: str) -> None:
    (found,) = trl_cpu.run({"max_steps": 2, "quant_scheme": scheme, "quant_kernels": kernels})
    assert [one["mismatch/abs_max"] for one in found["history"]] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "sapo"])
def test_trls_losses_run_on_quantized_rollouts(loss_type: str) -> None:
    (found,) = trl_cpu.run({"max_steps": 2, "loss_type": loss_type, "beta": 0.01 if loss_type == "grpo" else 0.0})
    assert [one["mismatch/abs_max"] for one in found["history"]] == [0.0, 0.0]
    if loss_type == "grpo":  # the reference is quantized too, so it is the policy before the first update
        assert found["history"][0]["kl"] == 0.0


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit() -> None:
    found = trl_cpu.resume()
    assert all(found["digests_equal"]) and found["masters_equal"] and found["metrics_equal"], found


@pytest.mark.slow
def test_two_processes_publish_the_same() -> None:
    found = trl_cpu.processes()
    assert found["digests_equal"] and found["masters_equal"] and found["abs_max"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "models/tiny-qwen3").is_dir(), reason="needs `make model`")
def test_the_example_runs(tmp_path: Path) -> None:
    given = ["max_steps=2", "per_device_train_batch_size=8", f"output_dir={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "examples/trl_addition.py", *given], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "'mismatch/abs_max': '0'" in run.stdout
