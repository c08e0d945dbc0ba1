"""Mixture-of-experts kernels on a device: vLLM's fused ones and ours, forward and gradients, against float64."""

from __future__ import annotations

import time

import pytest
import torch
from contract_checks import chosen_experts_reference
from expert_cases import exact, exact_weight, make, off, stacked
from kernels_by_scheme import EXPERTS_KERNELS, experts_kernels

from qarl.bench.expert_cases import ROUTINGS, ExpertLayer, experts
from qarl.bench.kernel_arguments import Arguments
from qarl.kernels.base import ExpertsKernel, ExpertsShape
from qarl.kernels.cuda import layer_ops
from qarl.kernels.cuda.vllm_experts import VllmMarlinExperts
from qarl.kernels.experts import LowBitExperts, fused_experts
from qarl.schemes import get_scheme

pytestmark = pytest.mark.gpu
SHAPE = ExpertsShape(experts=8, top_k=2, hidden=512, intermediate=256)


@pytest.mark.parametrize(
    ("scheme", "kernel"), EXPERTS_KERNELS, ids=lambda value: getattr(value, "name", value)
)
def test_forward_and_gradients(scheme: str, kernel: type) -> None:
    device = torch.device("cuda", 0)
    why_not = kernel.unavailable(get_scheme(scheme, 128), device, SHAPE)
    if why_not is not None:
        pytest.skip(why_not)
    x, weights, ids, gate_up, down = (tensor.to(device) for tensor in make(SHAPE, 61))
    wire = stacked(gate_up, scheme, 128), stacked(down, scheme, 128)
    inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
    experts = LowBitExperts.of(kernel, *wire, get_scheme(scheme, 128).operands)
    y = fused_experts(*inputs[:2], ids, *inputs[2:], experts)
    grad = torch.randn_like(y)
    y.backward(grad)
    w1, w2 = (exact_weight(tensors).requires_grad_() for tensors in wire)
    x64, weights64 = x.double().requires_grad_(), weights.double().requires_grad_()
    expected = exact(scheme, x64, weights64, ids, w1, w2)
    expected.backward(grad.double())
    # The truth quantizes as on CPU: where that parts from this kernel a code is the next one.
    allowed = {"w4a16": 6e-3, "w8a8": 1.5e-2, "fp8": 3e-2}[scheme]
    assert off(y, expected) < allowed
    for ours, true in zip(inputs, (x64, weights64, w1, w2), strict=True):
        assert ours.grad is not None and true.grad is not None
        assert off(ours.grad, true.grad) < allowed


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 16, 1000])
@pytest.mark.parametrize(
    ("sizes", "group_size"), [((32, 4, 2048, 768), 128), ((6, 2, 96, 64), 32)], ids=str
)
def test_against_float64(
    sizes: tuple[int, ...], group_size: int, routing: str, tokens: int
) -> None:
    """vLLM's kernels and ours; one that says that it serves must take the weights."""
    torch.manual_seed(0)
    arguments = Arguments(device="cuda", group_size=group_size)
    layer = ExpertLayer(ExpertsShape(*sizes), arguments, torch.device("cuda", 0))
    for competitor in experts(layer, tokens, routing):
        assert competitor.wrong() is None, competitor.name


def independent(scheme: str) -> list[type[ExpertsKernel]]:
    device = torch.device("cuda", 0)
    chosen = [kernel for kernel in experts_kernels(scheme) if kernel.row_invariant]
    return [k for k in chosen if k.unavailable(get_scheme(scheme, 128), device, SHAPE) is None]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_a_token_does_not_depend_on_the_others(scheme: str) -> None:
    """From one row an expert to more than any rule of the tiles has. Half of the experts get no token in a batch of
    one, and one expert gets half of the rows in all."""
    tokens = 4000
    x, weights, ids, gate_up, down = (tensor.to("cuda") for tensor in make(SHAPE, tokens))
    ids[::2, 0] = 0
    ids[::2, 1] = 1 + ids[::2, 1] % 7
    stacks = stacked(gate_up, scheme, 128), stacked(down, scheme, 128)
    kernels = independent(scheme)
    assert kernels, "no kernel of this scheme keeps tokens apart"
    for kernel in kernels:
        prepared = kernel.prepare(*stacks, get_scheme(scheme, 128).operands)
        whole = kernel.forward(x, weights, ids, prepared)
        assert whole.isfinite().all()
        for count in (1, 2, 8, 16, 64, 65, 128, 512, 1024, 1100, 2048):
            y = kernel.forward(x[:count], weights[:count], ids[:count], prepared)
            assert torch.equal(y, whole[:count]), (kernel.name, count)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6), (128, 8)])
def test_a_tokens_routing_does_not_depend_on_the_others(experts: int, top_k: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(size, 2048, device="cuda").bfloat16() for size in (4000, experts))
    logits = layer_ops.router_logits(x, weight)
    exact = x.double() @ weight.double().t()
    assert ((logits.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-2).all()
    chosen = layer_ops.chosen_experts(logits, top_k, renormalize=True)
    for count in (1, 16, 64, 65, 255, 512, 2048):
        assert torch.equal(layer_ops.router_logits(x[:count], weight), logits[:count]), count
        some = layer_ops.chosen_experts(logits[:count].contiguous(), top_k, renormalize=True)
        assert all(torch.equal(a, b[:count]) for a, b in zip(some, chosen, strict=True)), count
    expected = chosen_experts_reference(logits, top_k, renormalize=True)
    assert torch.equal(chosen[1], expected[1])
    assert torch.allclose(chosen[0], expected[0], rtol=1e-5)


def test_a_repeated_backward_gives_the_same_bits() -> None:
    device = torch.device("cuda", 0)
    x, weights, ids, gate_up, down = (tensor.to(device) for tensor in make(SHAPE, 300))
    kernel = next(k for k in experts_kernels("w4a16") if k.name == "triton")
    stacks = stacked(gate_up, "w4a16", 128), stacked(down, "w4a16", 128)
    experts = LowBitExperts.of(kernel, *stacks, get_scheme("w4a16", 128).operands)
    made = []
    for _ in range(3):
        inputs = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
        fused_experts(*inputs[:2], ids, *inputs[2:], experts).sum().backward()
        made.append([t.grad for t in inputs])
    for again in made[1:]:
        for first, second in zip(made[0], again, strict=True):
            assert first is not None and second is not None and torch.equal(first, second)


def test_marlin_is_compiled_once() -> None:
    device, scheme = torch.device("cuda", 0), get_scheme("w4a16", 128)
    if why_not := VllmMarlinExperts.unavailable(scheme, device, SHAPE):
        pytest.skip(why_not)
    assert VllmMarlinExperts.warm(scheme, device)
    began = time.monotonic()
    assert VllmMarlinExperts.warm(scheme, device)
    assert time.monotonic() - began < 1
