"""int4 codes in planes: the kernels against PyTorch, and PyTorch against the order that its docstring names."""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels import int4, int4_planes
from qarl.kernels.triton import planes

# N and K: less than a block, blocks and a part, more blocks than a program converts.
SHAPES = [(3, 32), (5, 96), (2, 128), (7, 160), (3, 896), (2, 2304)]


def make(n: int, k: int, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator).to(torch.int32)
    return packed, torch.randn(n, k // group, generator=generator).bfloat16()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_nibble_is_where_the_docstring_says(n: int, k: int) -> None:
    packed, _ = make(n, k)
    codes = int4.unpack_int4(packed)
    halves = int4_planes.to_planes(packed).view(torch.int16).to(torch.int32)
    for start in range(0, k, 128):
        columns = min(128, k - start)
        for position in range(4):
            for half in {0, 1, columns // 4 - 1}:
                column = start + position * columns // 4 + half
                nibble = (halves[:, start // 4 + half] >> (4 * position)) & 0xF
                assert torch.equal(nibble - 8, codes[:, column].to(torch.int32)), (column, half)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_kernels_against_pytorch(n: int, k: int) -> None:
    packed, scale = make(n, k)
    made = planes.to_planes(packed.to(DEVICE))
    assert torch.equal(made.cpu(), int4_planes.to_planes(packed))
    back = planes.dequantize_planes(made, int4_planes.to_pairs(scale).to(DEVICE))
    assert torch.equal(back.cpu(), int4.dequantize_int4(packed, scale))


def test_both_halves_of_a_pair_are_the_scale() -> None:
    _, scale = make(3, 96)
    halves = int4_planes.to_pairs(scale).view(torch.bfloat16).view(3, 3, 2)
    assert torch.equal(halves[..., 0], scale) and torch.equal(halves[..., 1], scale)
