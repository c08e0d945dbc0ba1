"""Mixture-of-experts kernels: routing, the forward against float64, and the straight-through backward against autograd
through float64 products of what the forward multiplied by."""

from __future__ import annotations

import pytest
import torch
from expert_cases import SHAPE, make, stacked
from kernels_by_scheme import experts_kernels

from qarl.errors import UserError
from qarl.kernels import grouped
from qarl.kernels.cpu.vllm_experts import CpuExperts
from qarl.kernels.experts import LowBitExperts, ReferenceExperts, fused_experts
from qarl.kernels.registry import choose_experts_kernel
from qarl.schemes import get_scheme

SCHEMES = ("w4a16", "w8a8", "fp8")
CPU = torch.device("cpu")


def test_routing_sorts_rows_and_restores_them() -> None:
    ids = torch.tensor([[4, 0], [0, 2], [4, 2]], dtype=torch.int32)
    routing = grouped.route(ids, 6)
    assert routing.ends.tolist() == [2, 2, 4, 4, 6, 6] and routing.ends.dtype == torch.int32
    assert routing.token.tolist() == [0, 1, 1, 2, 0, 2]
    rows = (routing.order[:, None] * torch.ones(1, 3)).bfloat16()
    assert grouped.combine(rows, routing, 2).tolist() == [[1.0] * 3, [5.0] * 3, [9.0] * 3]


def test_what_needs_no_gradient_gets_none() -> None:
    x, weights, ids, gate_up, down = make()
    experts = LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w4a16"), stacked(down, "w4a16"))
    router = weights.clone().requires_grad_()
    fused_experts(x, router, ids, None, None, experts).sum().backward()
    assert router.grad is not None and x.grad is None
    frozen = fused_experts(x, weights, ids, gate_up, down, experts)
    assert not frozen.requires_grad


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_on_cpu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(CpuExperts, "unavailable", lambda *arguments: "vllm is not installed")
    choice = choose_experts_kernel(get_scheme(scheme, 32), CPU, SHAPE)
    assert (
        choice.kernel is ReferenceExperts
        and len(choice.passed_over) == len(experts_kernels(scheme)) - 1
    )
    with pytest.raises(UserError, match="runs on GPUs"):
        choose_experts_kernel(get_scheme(scheme, 32), CPU, SHAPE, force="triton")
    with pytest.raises(UserError, match="no kernel of experts multiplies int4"):
        choose_experts_kernel(get_scheme("w4a8"), CPU, SHAPE)
