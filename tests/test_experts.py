"""Mixture-of-experts kernels: routing, the forward against float64, and the straight-through backward against autograd
through float64 products of what the forward multiplied by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qarl.errors import UserError
from qarl.kernels.activations import quantize_fp8, quantize_int8
from qarl.kernels.experts import grouped
from qarl.kernels.experts.fused import (
    EXPERTS_KERNELS,
    LowBitExperts,
    ReferenceExperts,
    choose_experts_kernel,
    fused_experts,
)
from qarl.kernels.experts.grouped import ExpertsShape
from qarl.quant import get_scheme, quantize

SHAPE = ExpertsShape(experts=5, top_k=2, hidden=96, intermediate=64)
SCHEMES = ("w4a16", "w8a8", "fp8")
CPU = torch.device("cpu")


def stacked(weights: torch.Tensor, scheme: str, group_size: int = 32) -> dict[str, torch.Tensor]:
    """The wire tensors of [E, N, K]."""
    each = [quantize(weight, get_scheme(scheme, group_size)).tensors for weight in weights]
    return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0] if name != "weight_shape"}


def make(shape: ExpertsShape = SHAPE, tokens: int = 23) -> tuple[torch.Tensor, ...]:
    """x, topk_weights, topk_ids, gate_up, down; expert 1 gets no token."""
    torch.manual_seed(0)
    experts, top_k, hidden, intermediate = shape
    x = torch.randn(tokens, hidden).bfloat16()
    scores = torch.rand(tokens, experts)
    scores[:, 1] = -1
    weights, ids = scores.topk(top_k)
    gate_up = (torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5).bfloat16()
    down = (torch.randn(experts, hidden, intermediate) / intermediate**0.5).bfloat16()
    return x, (weights / weights.sum(1, keepdim=True)).float(), ids.to(torch.int32), gate_up, down


def exact(scheme: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: Any, w2: Any) -> torch.Tensor:
    """float64, with the forward's roundings to BF16 and to 8 bits, which gradients pass straight through."""

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t + (t.detach().bfloat16().double() - t).detach()

    def seen(t: torch.Tensor) -> torch.Tensor:
        if scheme == "w4a16":
            return t
        values, scale = (quantize_int8 if scheme == "w8a8" else quantize_fp8)(t.detach().bfloat16())
        return t + (values.double() * scale.double() - t).detach()

    out = torch.zeros_like(x)
    for place in range(ids.shape[1]):
        for expert in range(len(w1)):
            rows = (ids[:, place] == expert).nonzero()[:, 0]
            gate, up = rounded(seen(x[rows]) @ w1[expert].t()).chunk(2, 1)
            y = seen(rounded(rounded(F.silu(gate)) * up)) @ w2[expert].t()
            out = out.index_add(0, rows, y * weights[rows, place, None])
    return out


def exact_weight(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 [E, N, K]; W4A16 multiplies by the BF16 rounding of code times scale, the others scale the sum."""
    if "weight_packed" in tensors:
        return grouped.dequantized(tensors).double()
    return tensors["weight"].double() * tensors["weight_scale"].double()


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().double().norm())


def test_routing_sorts_rows_and_restores_them() -> None:
    ids = torch.tensor([[4, 0], [0, 2], [4, 2]], dtype=torch.int32)
    routing = grouped.route(ids, 6)
    assert routing.ends.tolist() == [2, 2, 4, 4, 6, 6] and routing.ends.dtype == torch.int32
    assert routing.token.tolist() == [0, 1, 1, 2, 0, 2]
    rows = (routing.order[:, None] * torch.ones(1, 3)).bfloat16()
    assert grouped.combine(rows, routing, 2).tolist() == [[1.0] * 3, [5.0] * 3, [9.0] * 3]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_gradients(scheme: str) -> None:
    """BF16 rounds a row twice and its sum once: 0.3% of an output; a gradient some more times: 0.6%."""
    x, weights, ids, gate_up, down = make()
    wire = stacked(gate_up, scheme), stacked(down, scheme)
    inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
    y = fused_experts(*inputs[:2], ids, *inputs[2:], LowBitExperts.of(ReferenceExperts, *wire))
    grad = torch.randn_like(y)
    y.backward(grad)

    w1, w2 = (exact_weight(tensors).requires_grad_() for tensors in wire)
    x64, weights64 = x.double().requires_grad_(), weights.double().requires_grad_()
    expected = exact(scheme, x64, weights64, ids, w1, w2)
    expected.backward(grad.double())
    assert y.dtype == torch.bfloat16 and off(y, expected) < 3e-3
    for name, found, true in zip(["x", "weights", "gate_up", "down"], inputs, (x64, weights64, w1, w2), strict=True):
        assert found.grad is not None and true.grad is not None
        assert found.grad.dtype == found.dtype and off(found.grad, true.grad) < 6e-3, name
    assert inputs[2].grad is not None and not inputs[2].grad[1].any(), "an expert without tokens"


def test_what_needs_no_gradient_gets_none() -> None:
    x, weights, ids, gate_up, down = make()
    experts = LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w4a16"), stacked(down, "w4a16"))
    router = weights.clone().requires_grad_()
    fused_experts(x, router, ids, None, None, experts).sum().backward()
    assert router.grad is not None and x.grad is None
    frozen = fused_experts(x, weights, ids, gate_up, down, experts)
    assert not frozen.requires_grad


def test_no_tokens_launch_nothing() -> None:
    class NeverCalled(ReferenceExperts):
        @staticmethod
        def quantize(scheme_name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError("no rows to quantize")

    x, weights, ids, gate_up, down = make(tokens=0)
    experts = LowBitExperts.of(NeverCalled, stacked(gate_up, "w8a8"), stacked(down, "w8a8"))
    inputs = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    y = fused_experts(*inputs[:2], ids, *inputs[2:], experts)
    y.sum().backward()
    assert y.shape == (0, 96)
    for t in inputs:
        assert t.grad is not None and t.grad.shape == t.shape and not t.grad.any()
    frozen = fused_experts(x.detach().requires_grad_(), weights.detach(), ids, None, None, experts)
    frozen.sum().backward()


def test_experts_of_two_layers_are_refused() -> None:
    *_, gate_up, down = make()
    with pytest.raises(ValueError, match="two layers"):
        LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w8a8"), stacked(down[:3], "w8a8"))
    with pytest.raises(ValueError, match="two layers"):
        LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w8a8"), stacked(down, "fp8"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_on_cpu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = choose_experts_kernel(scheme, CPU, SHAPE, group_size=32)
    assert choice.kernel is ReferenceExperts and len(choice.passed_over) == len(EXPERTS_KERNELS[scheme]) - 1
    with pytest.raises(UserError, match="runs on GPUs"):
        choose_experts_kernel(scheme, CPU, SHAPE, group_size=32, force="triton")
    with pytest.raises(UserError, match="no kernel serves w4a8"):
        choose_experts_kernel("w4a8", CPU, SHAPE)
