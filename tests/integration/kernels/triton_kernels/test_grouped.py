"""Products of many experts against one dense product an expert: empty experts, single rows, several tiles."""

from __future__ import annotations

import pytest
import torch
from triton_checks import assert_one_rounding, needs_e4m3
from triton_rig import DEVICE, INTERPRETED

from qarl.kernels import grouped, int4
from qarl.kernels.reference import grouped_linear, quantize_fp8, quantize_int8
from qarl.kernels.triton import experts as products
from qarl.kernels.triton.experts import (
    grouped_scaled_mm,
    grouped_w4a16_backward_input,
    grouped_w4a16_linear,
    row_tiles,
)
from qarl.kernels.triton.tiles import Tile, choose
from qarl.schemes.base import INT4_BF16

COUNTS = [[3, 0, 1, 17, 0], [0, 0, 5], [40], [1] * 6]


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def make(
    counts: list[int], n: int, k: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (len(counts), n, k // 8)).to(torch.int32)
    scale = (torch.rand(len(counts), n, k // group) * 0.05 + 0.01).bfloat16()
    weight = int4.dequantize_int4(packed.flatten(0, 1), scale.flatten(0, 1)).view(len(counts), n, k)
    return packed, scale, weight


def assert_products(
    product: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> None:
    x, weight = x.double(), weight.double()
    assert_one_rounding(
        product, grouped_linear(x, weight, ends), grouped_linear(x.abs(), weight.abs(), ends)
    )


@pytest.mark.parametrize("tile", [None, Tile(16, 32, 64)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_w4a16(counts: list[int], tile: Tile | None) -> None:
    packed, scale, weight = make(counts, 33, 96, 32)
    ends, rows = ends_of(counts), sum(counts)
    x, grad = torch.randn(rows, 96).bfloat16(), torch.randn(rows, 33).bfloat16()
    arguments = [tensor.to(DEVICE) for tensor in (packed, scale, ends)]
    assert_products(grouped_w4a16_linear(x.to(DEVICE), *arguments, tile=tile), x, weight, ends)
    tile = tile and Tile(16, 16, 128)
    dx = grouped_w4a16_backward_input(grad.to(DEVICE), *arguments, tile=tile)
    assert_products(dx, grad, weight.mT, ends)


@pytest.mark.parametrize("tile", [None, Tile(16, 32, 64)], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("k", [64, 47])
def test_int8_is_exact(k: int, counts: list[int], tile: Tile | None) -> None:
    torch.manual_seed(0)
    x, x_scale = quantize_int8(torch.randn(sum(counts), k).bfloat16())
    weight, weight_scale = quantize_int8(torch.randn(len(counts), 40, k).bfloat16())
    ends = ends_of(counts)
    sums = grouped_linear(x.double(), weight.double(), ends).float()
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = ((sums * weight_scale[expert].squeeze(-1)) * x_scale).bfloat16()
    product = grouped_scaled_mm(
        *(t.to(DEVICE) for t in (x, x_scale, weight, weight_scale, ends)), tile=tile
    )
    assert torch.equal(product.cpu(), expected)


@needs_e4m3
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("counts", COUNTS[:2], ids=str)
def test_fp8(counts: list[int], fast: bool) -> None:
    torch.manual_seed(0)
    x, x_scale = quantize_fp8(torch.randn(sum(counts), 96).bfloat16())
    weight, weight_scale = quantize_fp8(torch.randn(len(counts), 40, 96).bfloat16())
    ends = ends_of(counts)
    a, b = x.double() * x_scale.double(), weight.double() * weight_scale.double()
    exact, size = grouped_linear(a, b, ends), grouped_linear(a.abs(), b.abs(), ends)
    product = grouped_scaled_mm(
        *(t.to(DEVICE) for t in (x, x_scale, weight, weight_scale, ends)), fast_accumulation=fast
    )
    assert_one_rounding(product, exact, size, 1e-6 if INTERPRETED else 2**-11)


def test_past_the_ridge_experts_are_dequantized() -> None:
    counts = [1700, 0, 400]
    assert choose("grouped_w4a16", torch.device(DEVICE), sum(counts) // 3) is None
    packed, scale, weight = make(counts, 32, 64, 32)
    ends = ends_of(counts)
    arguments = [tensor.to(DEVICE) for tensor in (packed, scale, ends)]
    x, grad = torch.randn(2100, 64).bfloat16(), torch.randn(2100, 32).bfloat16()
    assert_products(grouped_w4a16_linear(x.to(DEVICE), *arguments), x, weight, ends)
    assert_products(
        grouped_w4a16_backward_input(grad.to(DEVICE), *arguments), grad, weight.mT, ends
    )


@pytest.mark.parametrize("rows", [5, 2100], ids=["in_registers", "dequantized"])
def test_rows_of_x_by_their_tokens(rows: int) -> None:
    """`token` gives the bits of rows that were gathered before."""
    packed, scale, _ = make([0] * 3, 32, 64, 32)
    ends = torch.tensor([rows - 2, rows - 2, rows], dtype=torch.int32, device=DEVICE)
    x, token = torch.randn(4, 64).bfloat16().to(DEVICE), torch.randint(4, (rows,)).to(DEVICE)
    arguments = (packed.to(DEVICE), scale.to(DEVICE), ends)
    expected = grouped_w4a16_linear(x[token], *arguments)
    assert torch.equal(grouped_w4a16_linear(x, *arguments, token=token), expected)


def test_a_stack_is_dequantized_once_for_all_products_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 260 * 3
    packed, scale, weight = make([0] * 3, 32, 64, 32)
    ends = torch.tensor([700, 700, rows], dtype=torch.int32, device=DEVICE)
    tensors = {"weight_packed": packed.to(DEVICE), "weight_scale": scale.to(DEVICE)}
    copies = []
    whole = products.dequantized_stack
    monkeypatch.setattr(products, "dequantized_stack", lambda t: copies.append(1) or whole(t))
    stack = grouped.Stack(tensors, INT4_BF16)
    x, grad = (torch.randn(rows, size, device=DEVICE).bfloat16() for size in (64, 32))
    y, dx = grouped.product(x, None, stack, ends), grouped.input_gradient(grad, stack, ends)
    assert copies == [1]
    assert_products(y, x.cpu(), weight, ends.cpu())
    assert_products(dx, grad.cpu(), weight.mT, ends.cpu())


def test_the_grid_covers_every_routing() -> None:
    for rows, experts, block in (
        (0, 4, 16),
        (1, 4, 16),
        (16, 1, 16),
        (17, 1, 16),
        (100, 8, 16),
        (3, 64, 32),
    ):
        worst = 0
        for used in range(1, min(rows, experts) + 1):  # one row each, the rest in one expert
            worst = max(worst, used - 1 + -(-(rows - used + 1) // block))
        assert worst <= row_tiles(rows, experts, block) <= -(-rows // block) + min(rows, experts)
