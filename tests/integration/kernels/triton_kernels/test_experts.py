"""The whole expert layer by the Triton kernels, forward and backward, against the exact one in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_checks import SCHEMES
from triton_rig import DEVICE

from qarl.kernels.experts import (
    LowBitExperts,
    ReferenceExperts,
    TritonExperts,
    TritonInvariantExperts,
    fused_experts,
)
from qarl.quant import get_scheme, quantize

pytestmark = pytest.mark.slow  # `make test` has each kernel by itself: test_grouped, test_quantize

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 96, 64


def wire(weights: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    each = [quantize(weight, get_scheme(scheme, 32)).tensors for weight in weights]
    return {
        name: torch.stack([t[name] for t in each]).to(DEVICE)
        for name in each[0]
        if name != "weight_shape"
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_gradients(scheme: str) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).bfloat16()
    x = torch.randn(19, HIDDEN).bfloat16()
    weights, ids = torch.rand(19, EXPERTS - 1).topk(TOP_K)  # the last expert gets no token
    grad = torch.randn(19, HIDDEN).bfloat16()
    made = []
    for kernel in (TritonExperts, TritonInvariantExperts, ReferenceExperts):
        inputs = [
            t.detach().clone().to(DEVICE).requires_grad_() for t in (x, weights, gate_up, down)
        ]
        tensors = wire(gate_up, scheme), wire(down, scheme)
        experts = LowBitExperts.of(kernel, *tensors, get_scheme(scheme).operands)
        y = fused_experts(*inputs[:2], ids.to(DEVICE), *inputs[2:], experts)
        y.backward(grad.to(DEVICE))
        made.append([y.detach(), *(t.grad for t in inputs)])
    for results in made[:-1]:
        for tensor, expected in zip(results, made[-1], strict=True):
            assert tensor is not None and expected is not None
            # A code of 8 bits may be the next one where the two quantizers' arithmetics part.
            error = (tensor.double() - expected.double()).norm() / expected.double().norm()
            assert error < (5e-3 if scheme == "w4a16" else 2e-2)


COUNTS = (1, 16, 64, 65, 600)
"""Tokens beside which a token is computed: from one row an expert to more than any rule of the tables has."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_has_the_same_bits_whatever_is_beside_it(scheme: str) -> None:
    """The first tokens of a batch, and the first one beside tokens that all go to its experts. In a small batch some
    experts get no token."""
    torch.manual_seed(0)
    counts = COUNTS[:3] if scheme == "fp8" else COUNTS  # e4m3 takes minutes in the interpreter
    gate_up = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).bfloat16()
    x = torch.randn(counts[-1], HIDDEN).bfloat16().to(DEVICE)
    weights, ids = (t.to(DEVICE) for t in torch.rand(counts[-1], EXPERTS).topk(TOP_K))
    stacks = wire(gate_up, scheme), wire(down, scheme)
    prepared = TritonInvariantExperts.prepare(*stacks, get_scheme(scheme).operands)
    whole = TritonInvariantExperts.forward(x, weights, ids, prepared)
    assert whole.isfinite().all() and whole.float().std() > 0.01
    for count in counts[:-1]:
        rows = x[:count], weights[:count]
        y = TritonInvariantExperts.forward(*rows, ids[:count], prepared)
        assert torch.equal(y, whole[:count]), count
        crowded = ids[:1].expand(count, -1).contiguous()
        y = TritonInvariantExperts.forward(*rows, crowded, prepared)
        assert torch.equal(y[:1], whole[:1]), count


class Sizes(TorchDispatchMode):
    """How many FP32 numbers each operator's largest output has."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.fp32[str(func)] = max(made.numel(), self.fp32.get(str(func), 0))
        return made


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_the_backward_makes_no_fp32_copy_of_its_rows(scheme: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16().to(DEVICE).requires_grad_()
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16().to(DEVICE).requires_grad_()
    x = torch.randn(19, HIDDEN).bfloat16().to(DEVICE).requires_grad_()
    weights, ids = (t.to(DEVICE) for t in torch.rand(19, EXPERTS).topk(TOP_K))
    stacks = (wire(stack.detach().cpu(), scheme) for stack in (gate_up, down))
    experts = LowBitExperts.of(TritonExperts, *stacks, operands=get_scheme(scheme).operands)
    y = fused_experts(x, weights.requires_grad_(), ids, gate_up, down, experts)
    with Sizes() as sizes:
        y.backward(torch.ones_like(y))
    assert {
        name: size for name, size in sizes.fp32.items() if size >= 19 * TOP_K * INTERMEDIATE
    } == {}
