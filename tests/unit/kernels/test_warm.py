"""What the driver compiles at its first launch, launched by the doctor: a valid call, and what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.checks.check import Finding
from qarl.doctor.model import CHECKS, compiled_kernels
from qarl.kernels.cuda.vllm_experts import Experts, VllmMarlinExperts
from qarl.kernels.experts import TritonExperts
from qarl.kernels.int4 import CODES, SCALES, to_marlin
from qarl.kernels.registry import Choice
from qarl.schemes import get_scheme

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(VllmMarlinExperts, "forward", lambda *operands: found.append(operands))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append((device,)))
    return found


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_marlins_operands_are_those_of_a_layer(calls: list[Any], group_size: int) -> None:
    """As `prepare` makes them of wire tensors: several groups in a row of both stacks."""
    assert VllmMarlinExperts.warm(get_scheme("w4a16", group_size), CPU)
    (x, weights, ids, prepared), (waited,) = calls
    assert waited == CPU and isinstance(prepared, Experts)
    (tokens, hidden), experts = x.shape, len(prepared.gate_up)
    inner = prepared.gate_up_scale.shape[2] // 2
    for codes, scales, (n, k) in (
        (prepared.gate_up, prepared.gate_up_scale, (2 * inner, hidden)),
        (prepared.down, prepared.down_scale, (hidden, inner)),
    ):
        wire = {
            "weight_packed": torch.zeros(experts, n, k // 8, dtype=torch.int32),
            "weight_scale": torch.zeros(experts, n, k // group_size).bfloat16(),
        }
        expected = to_marlin(wire)
        for tensor, like in ((codes, expected[CODES]), (scales, expected[SCALES])):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        assert k > group_size and n % 64 == 0
    assert (weights.shape, weights.dtype) == ((tokens, 2), torch.float32)
    assert (ids.shape, ids.dtype) == ((tokens, 2), torch.int32)
    assert set(ids.flatten().tolist()) == set(range(experts))


def examined(kernel: Any) -> list[Finding]:
    here: Any = SimpleNamespace(device="cpu")
    return list(compiled_kernels(get_scheme("w4a16", 128), here, Choice(kernel, ())))


def test_the_doctor_launches_what_the_driver_compiles(calls: list[Any]) -> None:
    (check,) = (check for check in CHECKS if check.make is compiled_kernels)
    assert check.here and check.device == "cuda"
    (finding,) = examined(VllmMarlinExperts)
    assert finding.status == "ok" and "compiled vllm_marlin_experts" in finding.what
    assert len(calls) == 2
    assert examined(TritonExperts) == []


def test_a_full_gpu_stops_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*operands: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(VllmMarlinExperts, "forward", full)
    (finding,) = examined(VllmMarlinExperts)
    assert finding.status == "warning" and finding.why == "CUDA out of memory."
