"""The chains between the experts' products against float64. What a kernel does not write stays NaN (conftest.py)."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels.base import dequantize
from qarl.kernels.reference import quantize_fp8, quantize_int8
from qarl.kernels.triton.between_products import (
    clear_unused,
    combine,
    route,
    swiglu,
    swiglu_backward,
)

ROUNDING = 2**-8
"""The largest relative error of one rounding to BF16."""
TINY = torch.finfo(torch.float32).tiny
"""float64 has smaller numbers, such as silu(-200)."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 96), (3, 131), (2, 1100)], ids=str)
def test_swiglu_backward(shape: tuple[int, int], scheme: str, weighted: bool) -> None:
    rows, columns = shape
    torch.manual_seed(0)
    grad, gate_up = torch.randn(shape).bfloat16(), (3 * torch.randn(rows, 2 * columns)).bfloat16()
    if gate_up.numel():
        gate_up[0, 0] = -200.0  # exp(-gate) overflows
    weights, order = torch.rand(rows), torch.randperm(rows)
    codes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    gate, up = (half.double().requires_grad_() for half in gate_up.chunk(2, 1))
    product = torch.nn.functional.silu(gate) * up
    a, roundings = product.detach(), 2
    if scheme != "w4a16" and rows:
        codes = {"w8a8": quantize_int8, "fp8": quantize_fp8}[scheme](a.bfloat16())
        a, roundings = dequantize(*codes).double(), 0
    weight = weights[order, None].double()
    product.backward(grad.double() * weight)
    inputs = (grad, gate_up, *codes, weights, order)
    gradients = swiglu_backward(
        *(t if t is None else t.to(DEVICE) for t in inputs), weighted=weighted
    )

    assert gate.grad is not None and up.grad is not None
    expected, g = torch.cat((gate.grad, up.grad), 1), gate.detach()
    # Where the slope of silu is near 0, terms of this size cancel.
    factor = (grad.double() * weight).abs()
    size = torch.cat((factor * up.detach().abs() * (1 + g.abs()), factor * g.abs()), 1)
    assert gradients.hidden.dtype == torch.bfloat16 and gradients.router.dtype == torch.float32
    assert (
        (gradients.hidden.cpu().double() - expected).abs()
        <= expected.abs() * ROUNDING + size * 1e-6 + TINY
    ).all()
    parts = grad.double() * a
    error = (gradients.router.cpu().double()[order] - parts.sum(1)).abs()
    assert (
        error <= parts.abs().sum(1) * (roundings * ROUNDING * (1 + ROUNDING) + 1e-6) + TINY
    ).all()
    assert (gradients.weighted is not None) == weighted
    if gradients.weighted is not None:
        error = (gradients.weighted.cpu().double() - a * weight).abs()
        assert (
            error
            <= (a * weight).abs() * ((roundings + 1) * ROUNDING * (1 + ROUNDING) + 1e-6) + TINY
        ).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 96), (3, 131), (2, 1100)], ids=str)
def test_swiglu(shape: tuple[int, int]) -> None:
    rows, columns = shape
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(rows, 2 * columns)).bfloat16()
    gate_up[0, 0] = -200.0  # exp(-gate) overflows
    gate, up = gate_up.double().chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * up
    a = swiglu(gate_up.to(DEVICE)).cpu()
    assert a.dtype == torch.bfloat16 and a.shape == shape
    error = (a.double() - exact).abs()
    assert (error <= exact.abs() * (2 * ROUNDING * (1 + ROUNDING) + 1e-6) + TINY).all()


def test_silu_is_rounded_before_up_multiplies() -> None:
    """silu(1.5) = 1.2263617 rounds to 1.2265625. Times 1.328125 that is 1.6290283, which rounds to 1.6328125; without
    the first rounding it is 1.6287617, which rounds to 1.625. silu(1) = 0.7310586 rounds to 0.73046875, and with up
    1.0078125 the two are 0.734375 and 0.73828125."""
    gate_up = torch.tensor([[1.5, 1.328125], [1.0, 1.0078125]]).bfloat16()
    assert swiglu(gate_up.to(DEVICE)).tolist() == [[1.6328125], [0.734375]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 97), (4, 8, 1030)], ids=str)
def test_combine(shape: tuple[int, int, int], weighted: bool) -> None:
    tokens, top_k, columns = shape
    torch.manual_seed(0)
    rows, place = torch.randn(tokens * top_k, columns).bfloat16(), torch.randperm(tokens * top_k)
    weights = torch.rand(tokens, top_k) if weighted else None
    each = rows[place].view(shape).double()
    if weights is not None:
        each = each * weights.double()[..., None]
    output = combine(
        rows.to(DEVICE), place.to(DEVICE), top_k, weights if weights is None else weights.to(DEVICE)
    )
    error = (output.cpu().double() - each.sum(1)).abs()
    assert (error <= each.sum(1).abs() * ROUNDING + each.abs().sum(1) * 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (3, 2, 6), (700, 6, 7)])
def test_route(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    """Against a stable sort. With 4,200 pairs a program reads twice. The last expert gets no token."""
    torch.manual_seed(0)
    used = max(experts - 1, 1)
    ids = torch.rand(tokens, used).argsort(1)[:, :top_k].to(dtype)
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0)
    rows = route(ids.to(DEVICE), experts)
    assert torch.equal(rows.order.cpu(), order) and torch.equal(rows.ends.cpu().long(), ends)
    assert torch.equal(rows.token.cpu(), order // top_k)
    assert torch.equal(rows.order[rows.place].cpu(), torch.arange(tokens * top_k))
    assert (rows.order.dtype, rows.ends.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("counts", [[0, 3, 0, 0, 1], [0], [2]], ids=str)
def test_only_experts_without_rows_are_cleared(counts: list[int]) -> None:
    stack = torch.full((len(counts), 33, 41), 7.0, device=DEVICE).bfloat16()
    stack[torch.tensor(counts) == 0] = torch.nan
    cleared = clear_unused(stack, torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE))
    expected = torch.tensor([7.0 if count else 0.0 for count in counts])[:, None, None].expand(
        -1, 33, 41
    )
    assert cleared is stack and torch.equal(cleared.cpu().float(), expected)
