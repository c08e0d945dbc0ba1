"""Products add over K in ascending order, and every number of rows has the same order.

The operands make a wrong order visible. Each dot product of a kernel is exact in FP32, whatever its own order. Some of
the dots are large, and later ones cancel them, so the sum keeps only what was added in the right order: FP32 rounds
each of the small dots to the ulp of the sum so far. int8 sums are exact, so only their rows are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from triton_checks import needs_e4m3
from triton_rig import DEVICE, INTERPRETED

from qarl.kernels import int4
from qarl.kernels.int4_planes import to_pairs
from qarl.kernels.reference import quantize_int8
from qarl.kernels.triton.experts import grouped_scaled_mm, grouped_w4a16_linear
from qarl.kernels.triton.norms import add_rms_norm, rms_norm
from qarl.kernels.triton.planes import to_planes
from qarl.kernels.triton.router import router_logits
from qarl.kernels.triton.scaled_mm import scaled_mm
from qarl.kernels.triton.tiles import tables
from qarl.kernels.triton.w4a16_forward import w4a16_linear

N, K = 32, 512
ROWS = (1, 16, 64, 65, 512, 4096)
MOST = ROWS[-1]
E4M3 = torch.float8_e4m3fn
Columns = list[torch.Tensor]
"""The columns of K that a kernel adds at once, dot by dot."""
Product = Callable[[torch.Tensor], torch.Tensor]
"""x [M, K] -> y [M, N] on the CPU."""


def adjacent(terms: int, k: int = K) -> Columns:
    """Dots of `terms` adjacent columns. The interpreter adds a dot's terms at once, a GPU 16 or 32 at a time."""
    return list(torch.arange(k).split(terms))


def by_nibble() -> Columns:
    """Dots of the experts' W4A16 product: four in a block of 128 columns, every fourth column each."""
    return [128 * block + torch.arange(j, 128, 4) for block in range(K // 128) for j in range(4)]


def operands(
    dots: Columns, large: Sequence[int], power: tuple[int, int], least: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight in float64, [MOST, K] and [N, K]: integers of three bits, times powers of two.

    The dots `large` are multiplied by 2**power[0] in x, and by 2**power[1] in the weight, and cancelled by the dot that
    comes half a sum later. The others of the first half get up to 2**4, all of them 2**least.
    """
    generator = torch.Generator().manual_seed(0)
    k = sum(map(len, dots))
    x = torch.randint(-7, 8, (MOST, k), generator=generator).double() * 2.0**least
    weight = torch.randint(-7, 8, (N, k), generator=generator).double() * 2.0**least
    for dot, columns in enumerate(dots[: len(dots) // 2]):
        partner = dots[dot + len(dots) // 2]
        if dot in large:
            x[:, columns] *= 2.0 ** (power[0] - least)
            weight[:, columns] *= 2.0 ** (power[1] - least)
            x[:, partner], weight[:, partner] = -x[:, columns], weight[:, columns]
        else:
            x[:, columns] *= 2.0 ** int(torch.randint(0, 5, (), generator=generator))
    return x, weight


def summed(x: torch.Tensor, weight: torch.Tensor, dots: Columns) -> torch.Tensor:
    """Add the dots one after another, in FP32; round once to BF16."""
    total = torch.zeros(len(x), N)
    for columns in dots:
        exact = x[:, columns] @ weight[:, columns].t()
        assert torch.equal(exact.float().double(), exact)
        total += exact.float()
    return total.bfloat16()


def assert_ascending(
    product: Product, x: torch.Tensor, weight: torch.Tensor, dots: Columns
) -> None:
    expected = summed(x, weight, dots)
    assert not torch.equal(summed(x, weight, dots[::-1]), expected)
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), expected[:rows]), rows


def packed(codes: torch.Tensor) -> torch.Tensor:
    nibbles = (codes + 8).view(N, -1, 8) << (4 * torch.arange(8))
    words = nibbles.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("group", [32, 128])
def test_w4a16(group: int) -> None:
    dots = adjacent(32)
    x, codes = operands(dots, (1, 6), (20, 0), 0)
    scale = torch.full((N, K // group), 0.25).bfloat16()
    words = packed(codes.long())
    tensors = to_planes(words.to(DEVICE)), to_pairs(scale.to(DEVICE))

    def product(x: torch.Tensor) -> torch.Tensor:
        return w4a16_linear(x.bfloat16().to(DEVICE), *tensors, batch_invariant=True).cpu()

    assert_ascending(product, x, int4.dequantize_int4(words, scale).double(), dots)


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, 128])
def test_w4a16_experts(group: int) -> None:
    """All rows are of the second expert of three. Tiles follow from a third of the rows."""
    dots = by_nibble()
    x, codes = operands(dots, (1, 6), (20, 0), 0)
    words = packed(codes.long())[None].expand(3, -1, -1).contiguous()
    scale = torch.full((3, N, K // group), 0.25).bfloat16()
    tensors = words.to(DEVICE), scale.to(DEVICE)

    def product(x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([0, len(x), len(x)], dtype=torch.int32, device=DEVICE)
        rows = x.bfloat16().to(DEVICE)
        return grouped_w4a16_linear(rows, *tensors, ends, batch_invariant=True).cpu()

    assert_ascending(product, x, codes * 0.25, dots)


@pytest.mark.slow
@needs_e4m3
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_fp8(fast: bool, experts: bool) -> None:
    dots = adjacent(128, 1024)
    x, weight = operands(dots, (1,), (5, 5), -6)
    tensors = weight.to(E4M3).to(DEVICE), torch.ones(N, 1, device=DEVICE)

    def product(x: torch.Tensor) -> torch.Tensor:
        rows, scale = x.to(E4M3).to(DEVICE), torch.ones(len(x), 1, device=DEVICE)
        if not experts:
            y = scaled_mm(rows, scale, *tensors, fast_accumulation=fast, batch_invariant=True)
            return y.cpu()
        ends = torch.tensor([0, len(x), len(x)], dtype=torch.int32, device=DEVICE)
        stacks = [tensor[None].expand(3, -1, -1).contiguous() for tensor in tensors]
        return grouped_scaled_mm(rows, scale, *stacks, ends, fast_accumulation=fast).cpu()

    if INTERPRETED:
        assert_ascending(product, x, weight, dots)
    else:  # a tensor core keeps 14 bits of a sum
        assert all(torch.equal(product(x[:rows]), product(x)[:rows]) for rows in ROWS)


@pytest.mark.parametrize("experts", [False, True])
def test_int8_rows(experts: bool) -> None:
    torch.manual_seed(0)
    x, x_scale = (t.to(DEVICE) for t in quantize_int8(torch.randn(MOST, 192).bfloat16()))
    weight = [t.to(DEVICE) for t in quantize_int8(torch.randn(N, 192).bfloat16())]

    def product(rows: int) -> torch.Tensor:
        if not experts:
            return scaled_mm(x[:rows], x_scale[:rows], *weight)
        ends = torch.tensor([0, rows, rows], dtype=torch.int32, device=DEVICE)
        stacks = [tensor[None].expand(3, -1, -1).contiguous() for tensor in weight]
        return grouped_scaled_mm(x[:rows], x_scale[:rows], *stacks, ends)

    whole = product(MOST)
    assert whole.float().std() > 1
    assert all(torch.equal(product(rows), whole[:rows]) for rows in ROWS)


@pytest.mark.slow
def test_the_router() -> None:
    dots = adjacent(128, 1024)
    x, weight = operands(dots, (1,), (20, 0), 0)
    on_device = weight.bfloat16().to(DEVICE)

    def product(x: torch.Tensor) -> torch.Tensor:
        return router_logits(x.bfloat16().to(DEVICE), on_device).cpu()

    assert_ascending(product, x, weight, dots)


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, 4096])
def test_rows_of_norms(width: int) -> None:
    """A program has whole rows, so only their number is compared, alone and behind a residual addition."""
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).bfloat16().to(DEVICE)
        for shape in ((MOST, width), (MOST, width), (width,))
    )
    whole, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and whole.float().std() > 0.5
    for rows in ROWS[:-1]:
        assert torch.equal(rms_norm(total[:rows], weight, 1e-6), whole[:rows]), rows
        added = add_rms_norm(x[:rows], residual[:rows], weight, 1e-6)[0]
        assert torch.equal(added, whole[:rows]), rows


def test_the_tiles_of_one_order_share_the_block_of_k_and_split_no_sum() -> None:
    for kind, operations in tables().items():
        for name, rules in operations.items():
            if name.endswith("_invariant") and rules:
                assert rules[-1].max_m is None, (kind, name)
                assert len({rule.tile.BK for rule in rules}) == 1, (kind, name)
                assert {rule.tile.per_sm for rule in rules} == {0}, (kind, name)
            if name.startswith("grouped_fp8") and kind in ("hopper", "blackwell"):
                assert {rule.tile.BK for rule in rules} == {128}, (kind, name)
