"""W4A16 forward and dX against float64, their two paths against each other, and what must not change a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_checks import assert_one_rounding
from triton_rig import DEVICE

from qarl.kernels import int4
from qarl.kernels.int4_planes import to_pairs
from qarl.kernels.triton import tiles
from qarl.kernels.triton.planes import to_planes
from qarl.kernels.triton.tiles import Tile, choose
from qarl.kernels.triton.w4a16 import w4a16_backward_input
from qarl.kernels.triton.w4a16_forward import w4a16_linear

# M, N, K, group size: one row, N odd, K of an odd number of groups, more than a tile of everything.
SHAPES = [
    (1, 33, 256, 128),
    (5, 200, 128, 32),
    (7, 129, 192, 64),
    (17, 66, 640, 128),
    (65, 67, 160, 32),
]
FORWARD_TILES = [Tile(16, 32, 128), Tile(16, 64, 128, per_sm=4), Tile(64, 32, 128)]
BACKWARD_TILES = [Tile(16, 32, 128), Tile(16, 16, 64, per_sm=4), Tile(64, 64, 256)]
RAGGED = SHAPES[2]


def cases(tiles: list[Tile]) -> list[Any]:
    """Every shape with the table's tile, every tile with a ragged shape, and, slow under the interpreter, the rest."""
    return [
        pytest.param(
            *shape, tile, marks=() if tile is None or shape == RAGGED else pytest.mark.slow
        )
        for shape in SHAPES
        for tile in (None, *tiles)
    ]


def make(
    n: int, k: int, group: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes (compressed-tensors' layout), BF16 scales of many sizes, and the BF16 weight they stand for."""
    torch.manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8)).to(torch.int32)
    scale = (torch.rand(n, k // group) + 0.5).mul(0.01 * torch.randn(n, 1).exp()).bfloat16()
    return packed.to(DEVICE), scale.to(DEVICE), int4.dequantize_int4(packed, scale)


def forward(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, *more: Any, **named: Any
) -> torch.Tensor:
    """`w4a16_linear` of a weight in the wire format."""
    return w4a16_linear(x, to_planes(packed), to_pairs(scale), *more, **named)


def make_rows(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * torch.randn(rows, 1).exp()).bfloat16()


def assert_product(
    product: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> None:
    assert_one_rounding(
        product, a.double() @ b.double() + bias, a.double().abs() @ b.double().abs()
    )


@pytest.mark.parametrize(("m", "n", "k", "group", "tile"), cases(FORWARD_TILES), ids=str)
def test_forward(m: int, n: int, k: int, group: int, tile: Tile | None) -> None:
    packed, scale, weight = make(n, k, group)
    x, bias = make_rows(m, k), torch.randn(n).bfloat16()
    assert_product(forward(x.to(DEVICE), packed, scale, tile=tile), x, weight.t())
    assert_product(
        forward(x.to(DEVICE), packed, scale, bias.to(DEVICE), tile=tile),
        x,
        weight.t(),
        bias.double(),
    )


@pytest.mark.parametrize(("m", "n", "k", "group", "tile"), cases(BACKWARD_TILES), ids=str)
def test_backward_input(m: int, n: int, k: int, group: int, tile: Tile | None) -> None:
    packed, scale, weight = make(n, k, group)
    grad = make_rows(m, n)
    assert_product(w4a16_backward_input(grad.to(DEVICE), packed, scale, tile=tile), grad, weight)


@pytest.mark.parametrize("group", [32, 128])
def test_the_operand_is_the_rounded_product_of_code_and_scale(group: int) -> None:
    """Multiplying by ones of the unit matrix leaves the weights themselves, whatever the order of the sum."""
    packed, scale, weight = make(32, 128, group)
    tiny = torch.tensor(3e-39).bfloat16()
    scale[0], weight = (
        tiny,
        int4.dequantize_int4(packed.cpu(), torch.cat([tiny.expand_as(scale[:1]), scale[1:].cpu()])),
    )
    eye = torch.eye(128, device=DEVICE).bfloat16()
    assert torch.equal(forward(eye, packed, scale, tile=Tile(128, 32, 128)).t().cpu(), weight)
    assert torch.equal(
        w4a16_backward_input(eye[:32, :32], packed, scale, tile=Tile(32, 32, 128)).cpu(), weight
    )


def test_past_the_ridge_the_weight_is_dequantized_and_the_numbers_stay() -> None:
    device = torch.device(DEVICE)
    for operation in ("w4a16", "w4a16_backward"):
        assert choose(operation, device, 16) and choose(operation, device, 1024) is None
    packed, scale, _ = make(72, 128, 128)
    x, grad = make_rows(1024, 128).to(DEVICE), make_rows(1024, 72).to(DEVICE)
    pairs = [
        (forward(x, packed, scale), forward(x, packed, scale, tile=FORWARD_TILES[2])),
        (
            w4a16_backward_input(grad, packed, scale),
            w4a16_backward_input(grad, packed, scale, tile=BACKWARD_TILES[2]),
        ),
    ]
    for dequantized, fused in pairs:
        near = dequantized.abs().amax() * 2**-16  # an ulp has no size where a sum cancels
        assert ((dequantized - fused).abs() <= dequantized.abs() * 2**-7 + near).all()


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 128, per_sm=4), Tile(16, 32, 128)], ids=["split", "whole"]
)
def test_the_same_inputs_give_the_same_bits(tile: Tile) -> None:
    wide, tall = make(32, 512, 128)[:2], make(256, 64, 32)[:2]
    x, grad = make_rows(5, 512).to(DEVICE), make_rows(5, 256).to(DEVICE)
    assert (tiles.split(tile, 2, 8, 16, torch.device(DEVICE))[1] is None) == (tile.per_sm == 0)
    first = forward(x, *wide, tile=tile), w4a16_backward_input(grad, *tall, tile=tile)
    for _ in range(2):
        assert torch.equal(forward(x, *wide, tile=tile), first[0])
        assert torch.equal(w4a16_backward_input(grad, *tall, tile=tile), first[1])
    assert not any(counters.any() for counters in tiles._COUNTERS.values())


def test_batch_invariance() -> None:
    """A row has the bits that it has alone."""
    packed, scale, _ = make(96, 512, 128)
    x = make_rows(150, 512).to(DEVICE)
    y = forward(x, packed, scale, batch_invariant=True)
    for rows in (1, 2, 63, 65):
        assert torch.equal(forward(x[:rows], packed, scale, batch_invariant=True), y[:rows])


def test_strided_rows() -> None:
    packed, scale, _ = make(40, 128, 32)
    wide, tall = make_rows(6, 256).to(DEVICE), make_rows(128, 6).to(DEVICE)
    for x in (wide[:, :128], wide[::2, 128:], wide[:, ::2], tall.t()):
        assert torch.equal(forward(x, packed, scale), forward(x.contiguous(), packed, scale))
        grad = x[:, :40]
        expected = w4a16_backward_input(grad.contiguous(), packed, scale)
        assert torch.equal(w4a16_backward_input(grad, packed, scale), expected)


@pytest.mark.parametrize("group", [24, 16])
def test_groups_that_no_tile_has_are_refused(group: int) -> None:
    packed, scale, _ = make(32, 96, group)
    with pytest.raises(ValueError, match=f"group size {group} is not a power of two from 32 on"):
        forward(make_rows(3, 96).to(DEVICE), packed, scale)
