"""W4A16's forward on a GPU, y = x W^T + b, which adds over K in ascending order. `w4a16.py` has what it shares with dX.

The kernel reads its own copy of the weight (`qarl.kernels.int4_planes`), in which the nibbles at one position of 32
int16 are 32 adjacent columns. In the wire format they are every fourth column. This has three advantages:

- A step of 128 columns is four products of 32 in ascending order. Hopper's tensor cores add 16 columns at a time to one
  FP32 accumulator, so a sum that is not split has the order of cuBLAS's on the dequantized weight. (A last block of
  fewer than 128 columns has a quarter of them in each product, beside zeros.)
- Four tiles of x go to shared memory as they lie. In the order of the wire format, x must be sorted by k modulo 4,
  which takes it through registers.
- A scale belongs to whole products, so a thread needs one for each row. Pairs are copied ahead, by the same
  asynchronous copies as codes and x. Triton then dequantizes where the tensor core reads, and the weight stays out of
  shared memory. (It does not if scales are kept in registers from one step to the next.)

Tiles, bytes, flops and the choice between two paths are described in `w4a16.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.int4_planes import BLOCK, PLANES
from qarl.kernels.triton.numbers import LAUNCH, dot
from qarl.kernels.triton.planes import dequantize_planes
from qarl.kernels.triton.quantize import adjacent
from qarl.kernels.triton.tiles import Tile, choose, leave_part, split, sum_parts
from qarl.kernels.triton.w4a16 import PTX, group_size, plane, store_forward

LEAST_GROUP = BLOCK // PLANES
"""The smallest group size: a product of 32 columns has one scale a row."""


@triton.jit
def _whole_block(
    acc, x_ptr, x_rows, planes_ptr, rows, pairs_ptr, pair_rows, step,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of block `step`. `x_rows` [BM], `rows` and `pair_rows` [BN]: offsets of rows."""
    BH: tl.constexpr = BK // 4
    halves = tl.arange(0, BH)
    x_ptrs = x_ptr + x_rows[:, None] + (step * BK + halves)[None, :]
    packed = tl.load(planes_ptr + rows[:, None] + (step * BH + halves)[None, :])
    pair_0 = tl.load(pairs_ptr + pair_rows + step * BK // GROUP)
    pair_1 = pair_0
    pair_2 = pair_0
    pair_3 = pair_0
    if GROUP < 4 * BH:
        pair_2 = tl.load(pairs_ptr + pair_rows + (step * BK + 2 * BH) // GROUP)
        pair_3 = pair_2
    if GROUP < 2 * BH:
        pair_1 = tl.load(pairs_ptr + pair_rows + (step * BK + BH) // GROUP)
        pair_3 = tl.load(pairs_ptr + pair_rows + (step * BK + 3 * BH) // GROUP)
    x_0 = tl.trans(tl.load(x_ptrs))
    x_1 = tl.trans(tl.load(x_ptrs + BH))
    x_2 = tl.trans(tl.load(x_ptrs + 2 * BH))
    x_3 = tl.trans(tl.load(x_ptrs + 3 * BH))
    acc = dot(plane(packed, tl.broadcast_to(pair_0[:, None], (BN, BH)), 0, PTX), x_0, acc)
    acc = dot(plane(packed, tl.broadcast_to(pair_1[:, None], (BN, BH)), 1, PTX), x_1, acc)
    acc = dot(plane(packed, tl.broadcast_to(pair_2[:, None], (BN, BH)), 2, PTX), x_2, acc)
    return dot(plane(packed, tl.broadcast_to(pair_3[:, None], (BN, BH)), 3, PTX), x_3, acc)


@triton.jit
def _last_block(
    acc, x_ptr, x_rows, planes_ptr, rows, pairs_ptr, pair_rows, step, count,
    BK: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the products of a block with `count` int16 a row, or none."""
    BH: tl.constexpr = BK // 4
    halves = tl.arange(0, BH)
    inside = (halves < count)[None, :]
    packed = tl.load(
        planes_ptr + rows[:, None] + (step * BH + halves)[None, :], mask=inside, other=0
    )
    for position in tl.static_range(4):
        column = step * BK + position * count + halves
        pair = tl.load(
            pairs_ptr + pair_rows[:, None] + (column // GROUP)[None, :], mask=inside, other=0
        )
        x = tl.load(x_ptr + x_rows[:, None] + column[None, :], mask=inside, other=0.0)
        acc = dot(plane(packed, pair, position, PTX), tl.trans(x), acc)
    return acc


@triton.jit
def w4a16_kernel(
    x_ptr, planes_ptr, pairs_ptr, bias_ptr, y_ptr, workspace_ptr, counter_ptr, M, N, K, stride_xm, parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The grid is (tiles, parts). Adjacent programs share a tile of the weight. Without workspace, parts is 1."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_m = tl.cdiv(M, BM)
    row = (tile % tiles_m) * BM
    column = (tile // tiles_m) * BN
    x_ptr += row.to(tl.int64) * stride_xm
    x_rows = tl.minimum(tl.arange(0, BM), M - 1 - row) * stride_xm
    channels = tl.minimum(tl.arange(0, BN), N - 1 - column)
    planes_ptr += column.to(tl.int64) * (K // 4)
    rows = channels * (K // GROUP * (GROUP // 4))  # K / 4, so that the compiler knows its alignment
    pairs_ptr += column.to(tl.int64) * (K // GROUP)
    pair_rows = channels * (K // GROUP)
    blocks = tl.cdiv(K, BK)
    share = tl.cdiv(blocks, parts)
    last = tl.minimum(part * share + share, blocks)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(part * share, tl.minimum(last, K // BK)):
        acc = _whole_block(
            acc, x_ptr, x_rows, planes_ptr, rows, pairs_ptr, pair_rows, step, BN, BK, GROUP, PTX
        )
    if not EVEN_K:
        count = tl.where(last == blocks, K // 4 - K // BK * (BK // 4), 0)
        acc = _last_block(
            acc, x_ptr, x_rows, planes_ptr, rows, pairs_ptr, pair_rows, K // BK, count, BK, GROUP, PTX
        )  # fmt: skip
    if workspace_ptr is None:
        store_forward(acc, bias_ptr, y_ptr, row, column, M, N, BM, BN)
    else:
        tiles = tl.num_programs(0)
        if leave_part(acc, workspace_ptr, counter_ptr, tile, tiles, part, parts, BN, BM):
            total = sum_parts(workspace_ptr, counter_ptr, tile, tiles, parts, BN, BM)
            store_forward(total, bias_ptr, y_ptr, row, column, M, N, BM, BN)


def w4a16_linear(
    x: torch.Tensor,
    planes: torch.Tensor,
    pairs: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W^T + b, BF16 [M, N].

    x [M, K] BF16 (rows may be strided), `planes` int32 [N, K/8], `pairs` int32 [N, K/g], bias BF16 [N].
    `tile` overrides the table (for tests and tuning); its BK is 128. Raise ValueError if g is not a power of
    two, at least 32.
    """
    group, n, (m, k) = group_size(planes, pairs, LEAST_GROUP), planes.shape[0], x.shape
    tile = tile or choose("w4a16_invariant" if batch_invariant else "w4a16", x.device, m)
    if tile is None:
        return F.linear(x, dequantize_planes(planes, pairs), bias)
    assert tile.BK == BLOCK
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    x = adjacent(x)
    tiles = triton.cdiv(m, tile.BM) * triton.cdiv(n, tile.BN)
    count, workspace, counter = split(
        tile, tiles, triton.cdiv(k, tile.BK), tile.BM * tile.BN, x.device
    )
    launch(
        w4a16_kernel, (tiles, count),
        x, planes.view(torch.int16), pairs, bias, y, workspace, counter, m, n, k, x.stride(0), count,
        tile.BM, tile.BN, tile.BK, group, k % tile.BK == 0, PTX, **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y
