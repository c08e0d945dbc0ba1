"""The doctor about other machines: their GPUs, memory and parallel sizes, and the options that describe them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from doctor_rig import examine, said

from qarl.checks.machine import DoctorOptions, Machine, find_machine, this_machine
from qarl.doctor.__main__ import main

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


def examine_big(
    name: str, gpus: int, parallel: int, *arguments: str
) -> tuple[int, list[dict[str, Any]]]:
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
    code, findings = examine_big(
        "Qwen3-30B-A3B", 16, 2, ignore, "rollout.gpu_memory_utilization=0.3"
    )
    assert code == 0 and [f["what"] for f in findings if f["status"] == "error"] == []
    notes = said(findings, "note", "kernels")
    assert "not checked: which kernel of the trainer multiplies 18432 matrices of experts" in notes
    assert not any("reference" in what for what in said(findings, "warning", "kernels"))
    # 48 layers of four matrices and two stacks.
    assert any("288 low-bit layers" in what for what in said(findings, "ok", "published tensors"))
    assert "quant.group_size divides all layers" in said(findings, "ok", "layer sizes")
    assert any(
        what.startswith("18624 of 18625 linears") for what in said(findings, "ok", "ignore list")
    )
    assert any("30.5 billion" in what for what in said(findings, "ok", "model"))
    _, findings = examine_big("Qwen3-30B-A3B", 8, 2)
    assert said(findings, "error", "ignore list") == [
        "vLLM would quantize 48 routers, which the trainer keeps in BF16"
    ]
    # 30.5e9 parameters at 16 bytes are 57 GiB a GPU of 8 before anything else, and at 12 bytes 43.
    peaks = {}
    for options in ((), ("optim.name=muon",)):
        _, findings = examine_big(
            "Qwen3-30B-A3B", 8, 2, ignore, "rollout.gpu_memory_utilization=0.2", *options
        )
        (memory,) = (
            f["what"]
            for f in findings
            if f["topic"] == "memory" and "needed at the peak" in f["what"]
        )
        peaks[options] = float(memory.partition(": ")[2].partition(" GiB")[0])
    adamw, muon = peaks.values()
    assert adamw - muon == pytest.approx(4 * 29.9e9 / 8 / 2**30, abs=0.2)


@pytest.mark.parametrize(
    ("name", "parallel", "arguments", "errors"),
    [
        # 4736 inputs of down_proj and 896 of o_proj a GPU are 37 and 7 groups of 128; 2368 and 448 are not.
        ("Qwen2.5-Math-7B", 4, [], []),
        (
            "Qwen2.5-Math-7B",
            8,
            [],
            ["28 attention heads do not split", "56 layers cannot be split along their inputs"],
        ),
        # 192 inputs of an expert a GPU are not a multiple of 128, but of 64.
        ("Qwen3-30B-A3B", 4, [], ["6144 layers cannot be split along their inputs"]),
        ("Qwen3-30B-A3B", 4, ["quant.group_size=64"], []),
        ("Qwen3-8B", 16, [], []),  # each of 8 kv heads on two GPUs
    ],
)
@pytest.mark.verl
def test_tensor_parallel_sizes(
    name: str, parallel: int, arguments: list[str], errors: list[str]
) -> None:
    _, findings = examine_big(name, max(8, parallel), parallel, *arguments)
    reported = [f for f in findings if f["status"] == "error" and f["topic"] == "layer sizes"]
    assert [words in f["what"] for words, f in zip(errors, reported, strict=True)] == [True] * len(
        errors
    )


@pytest.mark.verl
@pytest.mark.parametrize(
    ("most", "longest", "status", "room"),
    [
        (64, 16384, "warning", "each of 64 sequences at a time has room for"),
        (512, 16384, "warning", "each of 256 sequences at a time has room for"),
        (64, 8192, "note", "each of 64 sequences"),
        (64, 2048, "ok", ""),
    ],
)
def test_room_of_the_kv_cache(most: int, longest: int, status: str, room: str) -> None:
    """A step has 2048 responses on eight engines, 256 for each."""
    _, findings = examine_big("Qwen3-8B", 8, 1, f"rollout.max_num_seqs={most}", "data.train_batch_size=256",
                              "data.max_prompt_length=1024", f"data.max_response_length={longest}")  # fmt: skip
    (finding,) = [f for f in findings if "KV cache holds" in f["what"]]
    assert finding["status"] == status and room in finding.get("why", "")
    assert status == "ok" or "gpu_memory_utilization" in finding["fix"]


@pytest.mark.verl
def test_memory_of_the_gpu_decides() -> None:
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "doctor.gpu_memory_gib=24")
    (error,) = [f for f in findings if f["status"] == "error"]
    assert error["topic"] == "memory"
    assert "of 24.0 GiB" in error["what"]
    assert error["lines"][-1].startswith("together")
    _, findings = examine_big("Qwen2.5-Math-7B", 8, 2, "rollout.gpu_memory_utilization=0.04")
    assert any("KV cache holds 0 tokens" in what for what in said(findings, "error", "memory"))


@pytest.mark.verl
@pytest.mark.parametrize(
    ("scheme", "capability", "error"),
    [
        ("fp8", 8.0, "compute capability 8.0 is too low for quant.scheme=fp8"),
        ("fp8", 9.0, None),
        ("w8a8", 12.0, "vLLM has no int8 products for compute capability 12.0"),
        ("w8a8", 9.0, None),
        ("w4a8", 9.0, "w4a8 rollouts are refused"),
    ],
)
def test_what_a_gpu_cannot_compute(scheme: str, capability: float, error: str | None) -> None:
    _, findings = examine_big(
        "Qwen3-8B", 8, 2, f"quant.scheme={scheme}", f"doctor.gpu_capability={capability}"
    )
    assert said(findings, "error", "machine") == ([] if error is None else [error])


@pytest.mark.parametrize(
    "argument",
    [
        "device=tpu",
        "gpu_memory_gib=much",
        "gpu_capability=-1",
        "gpu=h100",
        "json=",
        "json=/dev/null/x",
    ],
)
def test_options_of_the_doctor_itself(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert main(["config=run.yaml", f"doctor.{argument}"]) == 2
    said = capsys.readouterr().err
    key = argument.partition("=")[0]
    assert f"doctor.{key}" in said and ("qarl doctor --help" in said or "has no value" in said)


def test_targets() -> None:
    def target(**options: Any) -> Machine:
        return find_machine(DoctorOptions(**options))

    assert target(json="x") == this_machine()
    h100 = target(device="h100", gpu_memory_gib="80")
    assert (h100.device, h100.here, h100.capability, h100.gpu_memory_bytes) == (
        "cuda",
        False,
        90,
        80 * 2**30,
    )
    unnamed = target(gpu_memory_gib="48")
    assert (unnamed.capability, unnamed.gpu_memory_bytes) == (None, 48 * 2**30)
