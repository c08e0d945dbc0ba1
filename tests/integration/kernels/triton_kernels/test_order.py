"""A W4A16 product adds over K in ascending order, and every number of rows has the same order.

The operands make a wrong order visible. Each dot product of the kernel is exact in FP32, whatever its own order. Two of
the dots are about 2^30, and two later ones cancel them, so the sum keeps only what was added in the right order: FP32
rounds each of the small dots to the ulp of the sum so far. The last sum is small and exact in BF16.
"""

from __future__ import annotations

import pytest
import torch
from triton_rig import DEVICE

from qarl.kernels import int4
from qarl.kernels.int4_planes import to_pairs
from qarl.kernels.triton.planes import to_planes
from qarl.kernels.triton.tiles import tables
from qarl.kernels.triton.w4a16_forward import w4a16_linear

N, K = 32, 512
TERMS = 32
"""Products in one dot of the kernel, of adjacent columns. The interpreter adds them at once, a GPU 16 at a time."""
DOTS = K // TERMS
MOST = 4096
LARGE = (1, 6)
"""These dots are large. Each is cancelled by the dot that comes DOTS / 2 later."""


def columns_of(dot: int) -> torch.Tensor:
    """The columns of K that the kernel adds in dot number `dot`."""
    return dot * TERMS + torch.arange(TERMS)


def operands(group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x BF16 [MOST, K], codes [N, K] in -8..7 and scales BF16 [N, K / group], as above."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-7, 8, (MOST, K), generator=generator).double()
    codes = torch.randint(-8, 8, (N, K), generator=generator)
    for dot in range(DOTS):
        columns, partner = columns_of(dot), columns_of((dot + DOTS // 2) % DOTS)
        if dot in LARGE:
            x[:, columns] *= 2.0**20
            x[:, partner] = -x[:, columns]
            codes[:, partner] = codes[:, columns]
        elif dot < DOTS // 2:
            x[:, columns] *= 2.0 ** torch.randint(0, 5, (), generator=generator)
    scale = torch.full((N, K // group), 0.25).bfloat16()
    assert torch.equal(x.bfloat16().double(), x)
    return x.bfloat16(), codes, scale


def packed(codes: torch.Tensor) -> torch.Tensor:
    nibbles = (codes + 8).view(N, K // 8, 8) << (4 * torch.arange(8))
    words = nibbles.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def summed(x: torch.Tensor, weight: torch.Tensor, order: range) -> torch.Tensor:
    """Add the dots of `order` one after another, in FP32; round once to BF16."""
    total = torch.zeros(len(x), N)
    for dot in order:
        columns = columns_of(dot)
        exact = x[:, columns].double() @ weight[:, columns].double().t()
        assert torch.equal(exact.float().double(), exact)
        total += exact.float()
    return total.bfloat16()


@pytest.mark.parametrize("group", [32, 128])
def test_a_sum_ascends_over_k_and_no_number_of_rows_changes_a_bit(group: int) -> None:
    x, codes, scale = operands(group)
    weight = int4.dequantize_int4(packed(codes), scale)
    expected = summed(x, weight, range(DOTS))
    assert not torch.equal(summed(x, weight, range(DOTS - 1, -1, -1)), expected)
    tensors = to_planes(packed(codes).to(DEVICE)), to_pairs(scale.to(DEVICE))
    for rows in (1, 16, 64, 65, 512, MOST):
        y = w4a16_linear(x[:rows].to(DEVICE), *tensors, batch_invariant=True)
        assert torch.equal(y.cpu(), expected[:rows]), rows


def test_the_tiles_of_one_order_share_the_block_of_k_and_split_no_sum() -> None:
    for kind, operations in tables().items():
        for name, rules in operations.items():
            if name.endswith("_invariant") and rules:
                assert rules[-1].max_m is None, (kind, name)
                assert len({rule.tile.BK for rule in rules}) == 1, (kind, name)
                assert {rule.tile.per_sm for rule in rules} == {0}, (kind, name)
