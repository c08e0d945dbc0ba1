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
from safetensors.torch import load_file

from benchmarks.proofs import trl as trl_cpu
from qarl.checkpoint.resumable import tensors_digest
from qarl.data.entry_text import to_text

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
    (row,) = trl_cpu.run({"max_steps": 3, "gradient_checkpointing": True})
    assert row["level"] == "exact" and len(set(row["digests"].values())) > 1
    assert (
        len(row["history"]) == 3 and max(entry["mismatch/abs_max"] for entry in row["history"]) == 0
    )
    assert all("actor/inside_band_frac" in entry and "entropy" in entry for entry in row["history"])
    assert row["history"][0]["publish/mbytes"] > 0


LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def test_a_run_with_adapters_has_no_mismatch_and_publishes_them_alone(tmp_path: Path) -> None:
    steps = {
        "max_steps": 3,
        "learning_rate": 1e-3,
        "gradient_checkpointing": True,
        "save_quantized": str(tmp_path),
    }
    (row,) = trl_cpu.run(steps | {"lora": LORA})
    history = row["history"]
    assert [entry["mismatch/abs_max"] for entry in history] == [0.0] * 3
    assert (
        all(entry["grad_norm"] > 0 for entry in history) and len(set(row["digests"].values())) > 1
    )
    assert row["base_shared"] == 1
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    sizes = [entry["publish/mbytes"] * 1e6 for entry in history if "publish/mbytes" in entry]
    assert sizes[0] > 2 * sizes[1]  # with the base
    assert set(sizes[1:]) == {sum(tensor.nbytes for tensor in adapter.values())}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "bf16"])
def test_schemes_with_adapters(scheme: str) -> None:
    (row,) = trl_cpu.run({"max_steps": 2, "learning_rate": 1e-3, "quant_scheme": scheme, "lora": LORA, "beta": 0.01,
                          "loss_type": "grpo"})  # fmt: skip
    assert [entry["mismatch/abs_max"] for entry in row["history"]] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "sapo"])
def test_trls_losses_run_on_quantized_rollouts(loss_type: str) -> None:
    (row,) = trl_cpu.run(
        {"max_steps": 2, "loss_type": loss_type, "beta": 0.01 if loss_type == "grpo" else 0.0}
    )
    assert [entry["mismatch/abs_max"] for entry in row["history"]] == [0.0, 0.0]
    if (
        loss_type == "grpo"
    ):  # the reference is quantized too, so it is the policy before the first update
        assert row["history"][0]["kl"] == 0.0


@pytest.mark.slow
def test_accumulated_gradients_train_as_one_batch_does() -> None:
    """Four micro-batches of four rows, beside two of eight: the same rollouts, and the same update but for rounding."""
    steps = {"max_steps": 2, "seed": 1}
    halves = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
    }
    (whole,) = trl_cpu.run(steps | {"gradient_accumulation_steps": 2, "steps_per_generation": 2})
    (parts,) = trl_cpu.run(steps | halves)
    for entry, other in zip(whole["history"], parts["history"], strict=True):
        assert entry["mismatch/abs_max"] == other["mismatch/abs_max"] == 0.0
    first, same = whole["history"][0], parts["history"][0]
    assert first["reward"] == same["reward"]
    assert same["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
    assert len(set(parts["digests"].values())) == 2


@pytest.mark.slow
def test_what_is_saved_is_what_was_published(tmp_path: Path) -> None:
    (run,) = trl_cpu.run({"max_steps": 4, "learning_rate": 1e-6, "save_quantized": str(tmp_path)})
    assert [step["mismatch/abs_max"] for step in run["history"]] == [0.0] * 4
    saved = load_file(tmp_path / "model.safetensors")
    last = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert last["format"] == "pack-quantized" and any(
        name.endswith("weight_packed") for name in saved
    )
    assert tensors_digest(saved.items()) == run["published"]


@pytest.mark.slow
def test_a_run_with_evaluations() -> None:
    settings = {"max_steps": 4, "per_device_eval_batch_size": 8, "num_generations_eval": 4}
    (watched,) = trl_cpu.run(settings | {"eval_strategy": "steps", "eval_steps": 2})
    assert [entry["step"] for entry in watched["evaluations"]] == [2, 4]
    assert all(entry["eval_reward"] > 0 for entry in watched["evaluations"])
    assert [entry["mismatch/abs_max"] for entry in watched["history"]] == [0.0] * 4
    assert len(set(watched["digests"].values())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": LORA}], ids=["all weights", "adapters"])
def test_a_killed_run_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    row = trl_cpu.resumed(**settings)
    assert all(row["digests_equal"]) and row["masters_equal"] and row["metrics_equal"], row


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": LORA}], ids=["all weights", "adapters"])
def test_two_processes_publish_the_same(settings: dict[str, Any]) -> None:
    row = trl_cpu.two_processes(**settings)
    assert row["digests_equal"] and row["masters_equal"] and row["abs_max"] == 0


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "models/tiny-qwen3").is_dir(), reason="needs `make model`")
def test_the_example_runs(tmp_path: Path) -> None:
    arguments = ["max_steps=2", "per_device_train_batch_size=8", f"output_dir={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "examples/trl_addition.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "'mismatch/abs_max': '0'" in run.stdout


def test_a_step_on_a_task_of_reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards come from the library's scorer, which the reward's process finds by itself."""
    from smollm2 import skip_unless_installed

    skip_unless_installed("reasoning_gym")
    data = tmp_path / "train.jsonl"
    entry = {"question": "t3", "answer": "t7", "metadata": {}}
    info = {"task": "caesar_cipher", "parameters": "{}", "answer_in": "auto"}
    rows = [
        {
            "prompt": f"t3 t{i}",
            "reward_model": {"ground_truth": "t7"},
            "extra_info": info | {"entry": to_text(entry)},
        }
        for i in range(4, 60)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(trl_cpu.SETTINGS, "data", str(data))
    (row,) = trl_cpu.run({"max_steps": 1, "reward": "reasoning_gym"})
    (step,) = row["history"]
    assert step["mismatch/abs_max"] == 0
    assert 0 <= step["reward"] < 1
