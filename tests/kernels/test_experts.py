"""Mixture-of-experts kernels: routing, the forward against float64, and the straight-through backward against autograd
through float64 products of what the forward multiplied by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import SHAPE, exact, exact_weight, make, off, stacked
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from qarl.errors import UserError
from qarl.kernels.experts import grouped
from qarl.kernels.experts.autograd import (
    EXPERTS_KERNELS,
    LowBitExperts,
    ReferenceExperts,
    choose_experts_kernel,
    fused_experts,
)
from qarl.kernels.experts.cpu import VllmCpuExperts

SCHEMES = ("w4a16", "w8a8", "fp8")
CPU = torch.device("cpu")


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


@pytest.mark.parametrize(
    ("after", "early_stop", "runs"),
    [
        (lambda x, y: x + y, True, 1),
        (lambda x, y: x + y, False, 2),
        (lambda x, y: (x + y) * y, True, 2),  # the product saves y
    ],
    ids=["last", "without early stop", "read later"],
)
def test_a_recomputation_runs_the_kernel_only_if_its_output_is_read(after: Any, early_stop: bool, runs: int) -> None:
    called = []

    class Counted(ReferenceExperts):
        @classmethod
        def forward(cls, *arguments: Any) -> torch.Tensor:
            called.append(1)
            return super().forward(*arguments)

    x, weights, ids, gate_up, down = make()
    experts = LowBitExperts.of(Counted, stacked(gate_up, "w4a16"), stacked(down, "w4a16"))
    made = []
    for recompute in (False, True):
        inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]

        def block(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return after(x, fused_experts(x * 0.5, others[0] * 0.5, ids, *others[1:], experts))

        called.clear()
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
            y.square().sum().backward()
        assert len(called) == (runs if recompute else 1)
        made.append([y, *(t.grad for t in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_a_second_derivative_is_refused() -> None:
    x, weights, ids, gate_up, down = make()
    experts = LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w4a16"), stacked(down, "w4a16"))
    y = fused_experts(x.requires_grad_(), weights, ids, None, None, experts)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_experts_of_two_layers_are_refused() -> None:
    *_, gate_up, down = make()
    with pytest.raises(ValueError, match="do not match"):
        LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w8a8"), stacked(down[:3], "w8a8"))
    with pytest.raises(ValueError, match="do not match"):
        LowBitExperts.of(ReferenceExperts, stacked(gate_up, "w8a8"), stacked(down, "fp8"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_on_cpu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(VllmCpuExperts, "unavailable", lambda *arguments: "vllm is not installed")
    choice = choose_experts_kernel(scheme, CPU, SHAPE, group_size=32)
    assert choice.kernel is ReferenceExperts and len(choice.passed_over) == len(EXPERTS_KERNELS[scheme]) - 1
    with pytest.raises(UserError, match="runs on GPUs"):
        choose_experts_kernel(scheme, CPU, SHAPE, group_size=32, force="triton")
    with pytest.raises(UserError, match="no kernel serves w4a8"):
        choose_experts_kernel("w4a8", CPU, SHAPE)
