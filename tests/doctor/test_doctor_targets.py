"""The doctor about other machines: their GPUs, memory and parallel sizes, and the options that describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from doctor_rig import examine, said

from qarl.checks.machine import GPUS, find_machine, this_machine
from qarl.doctor.__main__ import main
from qarl.rollout.engine_config import W4A8_ON_GPUS

pytestmark = pytest.mark.usefixtures("startable_run")

MODELS = ROOT / "qarl" / "bench" / "models"


BIG = """\
name: big
backend: verl
model: {path: PATH, gradient_checkpointing: true}
data:
  train_files: not/here.parquet
  train_batch_size: 64
  max_prompt_length: 1024
  max_response_length: 3072
rollout: {n: 8, gpu_memory_utilization: 0.5}
reward: {function: math_verify}
actor:
  ppo_mini_batch_size: 64
  ppo_micro_batch_size_per_gpu: 1
  log_prob_micro_batch_size_per_gpu: 1
trainer: {total_training_steps: 100, val_before_train: false, save_final: false}
"""


def examine_big(name: str, gpus: int, parallel: int, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings on GPUs of another machine."""
    Path("big.yaml").write_text(BIG.replace("PATH", str(MODELS / name)))
    return examine(
        f"trainer.n_gpus_per_node={gpus}",
        f"rollout.tensor_model_parallel_size={parallel}",
        "doctor.device=h100",
        *arguments,
        config="big.yaml",
    )


@pytest.mark.verl
def test_the_mixture_of_experts_has_its_experts_counted() -> None:
    ignore = 'quant.ignore=[lm_head, "re:.*mlp[.]gate$"]'
    code, findings = examine_big("Qwen3-30B-A3B", 16, 2, ignore, "rollout.gpu_memory_utilization=0.3")
    assert code == 0 and [f["what"] for f in findings if f["status"] == "error"] == []
    notes = said(findings, "note", "kernels")
    assert "not checked: which kernel of the trainer multiplies 18432 matrices of experts" in notes
    assert not any("reference" in what for what in said(findings, "warning", "kernels"))
    # 48 layers of four matrices and two stacks.
    assert any("288 low-bit layers" in what for what in said(findings, "ok", "published tensors"))
    assert "quant.group_size divides all layers" in said(findings, "ok", "layer sizes")
    assert any(what.startswith("18624 of 18625 linears") for what in said(findings, "ok", "ignore list"))
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2)
    assert said(findings, "error", "ignore list") == ["vLLM would quantize 48 routers, which the trainer keeps in BF16"]
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2, ignore, "quant.scheme=w8a8")
    assert said(findings, "error", "kernels") == ["vLLM has no int8 products for experts on GPUs"]
    # 30.5e9 parameters at 16 bytes are 57 GiB a GPU of 8 before anything else, at 12 bytes 43, and at 10 bytes 36.
    peaks = {}
    for given in ((), ("optim.name=muon",), ("optim.name=muon", "optim.master_dtype=bf16")):
        _, findings = examine_big("Qwen3-30B-A3B", 8, 2, ignore, "rollout.gpu_memory_utilization=0.2", *given)
        (memory,) = (f["what"] for f in findings if f["topic"] == "memory" and "needed at the peak" in f["what"])
        peaks[given] = float(memory.partition(": ")[2].partition(" GiB")[0])
    adamw, muon, bf16 = peaks.values()
    assert adamw - muon == pytest.approx(4 * 29.9e9 / 8 / 2**30, abs=0.2)
    assert muon - bf16 == pytest.approx(2 * 30.5e9 / 8 / 2**30, abs=0.2)


@pytest.mark.parametrize(
    ("name", "gpus", "parallel", "arguments", "errors"),
    [
        # 4736 inputs of down_proj and 896 of o_proj a GPU are 37 and 7 groups of 128; 2368 and 448 are not.
        ("Qwen2.5-Math-7B", 4, 4, [], []),
        ("Qwen2.5-Math-7B", 8, 8, ["quant.group_size=64"], ["28 attention heads do not split"]),
        (
            "Qwen2.5-Math-7B",
            8,
            8,
            [],
            ["28 attention heads do not split", "56 layers cannot be split along their inputs"],
        ),
        # 192 inputs of an expert a GPU are not a multiple of 128, but of 64.
        ("Qwen3-30B-A3B", 8, 4, [], ["6144 layers cannot be split along their inputs"]),
        ("Qwen3-30B-A3B", 8, 4, ["quant.group_size=64"], []),
        ("Qwen3-8B", 6, 3, [], ["32 attention heads", "8 key-value heads", "vocabulary of 151936", "a width of 4096"]),
        ("Qwen3-8B", 16, 16, [], []),  # each of 8 kv heads on two GPUs
        ("Qwen3-8B", 8, 8, ["quant.scheme=w8a8"], []),
    ],
)
@pytest.mark.verl
def test_tensor_parallel_sizes(name: str, gpus: int, parallel: int, arguments: list[str], errors: list[str]) -> None:
    prompts = ["data.train_batch_size=48", "actor.ppo_mini_batch_size=48"]
    _, findings = examine_big(name, gpus, parallel, *arguments, *prompts)
    found = [f for f in findings if f["status"] == "error" and f["topic"] == "layer sizes"]
    if len(errors) < 4:
        assert len(found) == len(errors), found
    for words in errors[:3]:
        assert any(words in f["what"] for f in found), (words, found)
    assert all("sizes that work here: 1, 2" in f["fix"] for f in found)


@pytest.mark.verl
@pytest.mark.parametrize(
    ("most", "longest", "status", "words"),
    [
        (64, 16384, "warning", "13.8 sequences of full length"),
        (512, 16384, "warning", "13.8 sequences of full length"),
        (64, 8192, "note", "26.0 sequences of full length"),
        (64, 2048, "ok", "78.1 sequences of full length"),
    ],
)
def test_room_of_the_kv_cache(most: int, longest: int, status: str, words: str) -> None:
    """A step has 2048 responses on eight engines, 256 for each."""
    _, findings = examine_big("Qwen3-8B", 8, 1, f"rollout.max_num_seqs={most}", "data.train_batch_size=256",
                              "data.max_prompt_length=1024", f"data.max_response_length={longest}")  # fmt: skip
    (finding,) = [f for f in findings if "KV cache holds" in f["what"]]
    assert finding["status"] == status and words in finding["what"]
    assert status == "ok" or ("preempts sequences" in finding["why"] and "gpu_memory_utilization" in finding["fix"])


@pytest.mark.verl
def test_memory_of_the_gpu_decides() -> None:
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "doctor.gpu_memory_gib=24")
    (error,) = [f for f in findings if f["status"] == "error"]
    assert error["topic"] == "memory"
    assert "of 24.0 GiB" in error["what"]
    assert error["lines"][-1].startswith("together")
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "rollout.gpu_memory_utilization=0.04")
    assert any("KV cache holds 0 tokens" in what for what in said(findings, "error", "memory"))
    code = main(["config=run.yaml", "doctor.gpu_memory_gib=0.5", "doctor.json=findings.json"])
    assert code == 1
    findings = json.loads(Path("findings.json").read_text())["findings"]
    assert any("GiB needed at the peak" in what for what in said(findings, "error", "memory"))


@pytest.mark.verl
def test_what_a_gpu_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=fp8", "doctor.gpu_capability=8.0")
    (error,) = [f for f in findings if f["status"] == "error"]
    assert "8.0 is too low for quant.scheme=fp8" in error["what"]
    assert "without a warning" in error["why"]
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=fp8")
    assert said(findings, "error") == []
    for capability in (10.0, 12.0):
        _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=w8a8", f"doctor.gpu_capability={capability}")
        assert said(findings, "error", "machine") == [f"vLLM has no int8 products for compute capability {capability}"]
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=w8a8", "doctor.gpu_capability=9.0")
    assert said(findings, "error", "machine") == []
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CutlassInt8ScaledMMLinearKernel")
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=w8a8", "doctor.gpu_capability=10.0")
    assert said(findings, "error", "machine") == []
    _, findings = examine_big("Qwen3-8B", 8, 2, "quant.scheme=w4a8")
    assert said(findings, "error", "machine") == ["w4a8 rollouts are refused"]
    assert [W4A8_ON_GPUS in f["why"] for f in findings if f["what"] == "w4a8 rollouts are refused"] == [True]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("doctor.device=tpu", "doctor.device=tpu is not known"),
        ("doctor.gpu_memory_gib=much", "not a number above 0"),
        ("doctor.gpu_capability=-1", "not a number above 0"),
        ("doctor.gpu=h100", "cannot use"),
        ("doctor.json=", "cannot use"),
    ],
)
def test_options_of_the_doctor_itself(capsys: pytest.CaptureFixture[str], argument: str, words: str) -> None:
    assert main(["config=run.yaml", argument]) == 2
    assert words in capsys.readouterr().err


def test_targets() -> None:
    assert find_machine({}) == this_machine()
    assert find_machine({"json": "x"}).here
    h100 = find_machine({"device": "H100", "gpu_memory_gib": "80"})
    assert (h100.device, h100.here, h100.capability, h100.gpu_memory_bytes) == ("cuda", False, 90, 80 * 2**30)
    unnamed = find_machine({"gpu_memory_gib": "48"})
    assert (unnamed.capability, unnamed.gpu_memory_bytes) == (None, 48 * 2**30)
    assert all(find_machine({"device": name}).gpu_memory_bytes for name in GPUS)
