"""8-bit products: int8 to the bit, e4m3 against float64, with and without the tensor memory accelerator."""

from __future__ import annotations

import pytest
import torch
from triton_checks import assert_one_rounding, needs_e4m3
from triton_rig import DEVICE, INTERPRETED

from qarl.kernels.reference import quantize_fp8, quantize_int8
from qarl.kernels.triton.scaled_mm import scaled_mm, takes_tma
from qarl.kernels.triton.tiles import Tile, processors

KINDS = ["int8", pytest.param("fp8", marks=needs_e4m3)]
TILES = [None, Tile(16, 32, 64), Tile(16, 32, 32, per_sm=4), Tile(16, 16, 64, per_sm=1)]
SHAPES = [(1, 33, 256), (5, 96, 47), (17, 66, 192), (40, 35, 208)]


def make(kind: str, m: int, n: int, k: int) -> list[torch.Tensor]:
    """x, its scales, weight, its scales, on the CPU."""
    torch.manual_seed(0)
    quantize = quantize_int8 if kind == "int8" else quantize_fp8
    x = torch.randn(m, k) * torch.randn(m, 1).exp()
    return [
        *quantize(x.bfloat16()),
        *quantize((torch.randn(n, k) * torch.randn(n, 1).exp()).bfloat16()),
    ]


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_int8_has_the_bits_of_the_exact_sum_scaled_in_order(
    m: int, n: int, k: int, tile: Tile | None
) -> None:
    x, x_scale, weight, weight_scale = tensors = make("int8", m, n, k)
    sums = (x.long() @ weight.long().t()).float()
    scaled = (sums * weight_scale.t()) * x_scale
    assert torch.equal(scaled_mm(*on_device(tensors), tile=tile).cpu(), scaled.bfloat16())
    bias = torch.randn(n).bfloat16()
    fused = ((sums * weight_scale.t()).double() * x_scale.double() + bias.double()).float()
    product = scaled_mm(*on_device(tensors), bias.to(DEVICE), tile=tile).cpu()
    if INTERPRETED:  # it rounds the product before it adds, where a GPU does not
        near = fused.abs() * 2**-7 + scaled.abs() * 2**-23
        assert ((product.double() - fused.double()).abs() <= near).all()
        assert (product == fused.bfloat16()).float().mean() > 0.99
    else:
        assert torch.equal(product, fused.bfloat16())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@needs_e4m3
def test_fp8(m: int, n: int, k: int, tile: Tile | None, fast: bool) -> None:
    x, x_scale, weight, weight_scale = tensors = make("fp8", m, n, k)
    bias = torch.randn(n).bfloat16()
    a, b = x.double() * x_scale.double(), (weight.double() * weight_scale.double()).t()
    # Hopper keeps 14 bits of a sum: of all of it if `fast`, else of a step's, at most 128 terms.
    error = 2**-11 if fast and not INTERPRETED else 1e-6 if INTERPRETED else 2**-13
    for bias_argument, added in (((), 0), ((bias.to(DEVICE),), bias.double())):
        product = scaled_mm(*on_device(tensors), *bias_argument, fast_accumulation=fast, tile=tile)
        assert_one_rounding(product, a @ b + added, a.abs() @ b.abs(), error)


@pytest.mark.parametrize("kind", KINDS)
def test_tma_and_plain_loads_give_the_same_bits(kind: str) -> None:
    x, x_scale, weight, weight_scale = on_device(make(kind, 20, 50, 192))
    apart = (
        torch.zeros(20, 200, dtype=x.dtype, device=DEVICE)
        if kind == "int8"
        else x.new_empty(20, 200)
    )
    apart[:, :192] = x
    strided = apart[:, :192]
    assert not takes_tma(strided, weight)
    for tile in TILES[1:]:
        plain = scaled_mm(strided, x_scale, weight, weight_scale, tile=tile)
        assert torch.equal(plain, scaled_mm(x, x_scale, weight, weight_scale, tile=tile))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariance(kind: str) -> None:
    x, x_scale, weight, weight_scale = on_device(make(kind, 140, 40, 96))
    y = scaled_mm(x, x_scale, weight, weight_scale, batch_invariant=True)
    for rows in (1, 3, 129):
        alone = scaled_mm(x[:rows], x_scale[:rows], weight, weight_scale, batch_invariant=True)
        assert torch.equal(alone, y[:rows])


def test_tiles_are_cut_into_programs_as_meant() -> None:
    device = torch.device(DEVICE)
    assert Tile(16, 32, 32, per_sm=4).persistent(4 * processors(device) + 1, device)
    assert not Tile(16, 32, 32, per_sm=4).persistent(4 * processors(device), device)
    assert not Tile(16, 32, 64).persistent(10**6, device)
