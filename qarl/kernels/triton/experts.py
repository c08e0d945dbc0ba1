"""Grouped products of mixtures of experts in Triton. `between_products.py` has what a layer does beside them.

Rows are sorted by expert (`qarl.kernels.experts.Routing`), and each expert's weight multiplies only its own
rows. Expert e has the rows ends[e-1]..ends[e]-1 of x. `ends` is int32 [E] on the device, as in PyTorch's `grouped_mm`.
There is no padding: an expert with c rows has ceil(c / BM) tiles. The host does not know their number without waiting
for the device. So the grid has as many programs as any routing of M rows to E experts could need. A program finds its
expert by a cumulative sum over the E counts, and exits if there is none.

Tiles, bytes and flops are those of the dense products (`w4a16.py`, `scaled_mm.py`), but sums are not split, and
weights of experts without rows are not read. For W4A16 with many rows per expert, all experts are dequantized to a
transient BF16 buffer for PyTorch's grouped product. This choice depends only on M / E, the mean number of rows, so
routing cannot change it.

With `batch_invariant`, the W4A16 product dequantizes in registers for any M / E, in steps of one length (BK). So each
sum is added in one order, whatever the tile. int8 sums are exact, and all tiles of FP8 have one BK on Hopper
and Blackwell (10.x). On capability 12.x, where no level promises equal bits, they have two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl.kernels.base import Tensors, launch
from qarl.kernels.triton.numbers import LAUNCH
from qarl.kernels.triton.quantize import adjacent, dequantize_int4, dequantize_rows
from qarl.kernels.triton.scaled_mm import (
    operation_of,
    scaled_tile,
    store_scaled,
    takes_tma,
    tile_coordinates,
)
from qarl.kernels.triton.tiles import Tile, choose
from qarl.kernels.triton.w4a16 import (
    PTX,
    backward_tile,
    forward_tile,
    group_size,
    in_order,
    store_forward,
    store_rows,
)

Copy = Callable[[], torch.Tensor]
"""Returns a BF16 weight [E, N, K]."""
_FAR = 2**31  # elements of x from which on an offset does not fit 32 bits


@triton.jit
def find_expert(tile, ends_ptr, experts, BM: tl.constexpr, SIZE: tl.constexpr):
    """Return (expert, first row, end of the expert's rows) of row tile `tile`. An unused tile has the expert SIZE."""
    index = tl.arange(0, SIZE)
    ends = tl.load(ends_ptr + index, mask=index < experts, other=0)
    begins = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < experts), other=0)
    tiles = tl.where(index < experts, (ends - begins + BM - 1) // BM, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(index < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(index == expert, begins, 0), 0)
    end = tl.sum(tl.where(index == expert, ends, 0), 0)
    return expert, begin + (tile - before) * BM, end


@triton.jit
def grouped_w4a16_kernel(
    x_ptr, token_ptr, packed_ptr, scale_ptr, ends_ptr, y_ptr, experts, tiles_m, N, K, stride_xm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N]. The grid is `tiles_m` row tiles, used or not, times the tiles of N.

    `token_ptr`: the row of x that each row multiplies, if x is not sorted. Then all offsets in x fit 32 bits."""
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tiles_m, tl.cdiv(N, BN))
    expert, row, end = find_expert(tile_m, ends_ptr, experts, BM, SIZE)
    if expert < experts:
        column = tile_n * BN
        channel = expert.to(tl.int64) * N + column
        x_rows = tl.minimum(tl.arange(0, BM), end - 1 - row)
        if token_ptr is None:
            start_ptr = x_ptr + row.to(tl.int64) * stride_xm
        else:
            start_ptr = x_ptr
            x_rows = tl.load(token_ptr + row + x_rows).to(tl.int32)
        acc = forward_tile(
            start_ptr, x_rows * stride_xm,
            packed_ptr + channel * (K // 4), scale_ptr + channel * (K // GROUP),
            tl.minimum(tl.arange(0, BN), N - 1 - column),
            K, 0, tl.cdiv(K, BK), BM, BN, BK, GROUP, EVEN_K, PTX,
        )  # fmt: skip
        store_forward(acc, None, y_ptr, row, column, end, N, BM, BN)


@triton.jit
def grouped_w4a16_backward_kernel(
    grad_ptr, packed_ptr, scale_ptr, ends_ptr, dx_ptr, experts, tiles_m, N, K, stride_gm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, PTX: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute dX [M, K] in tiles of BM by BK. The grid is `tiles_m` row tiles, used or not, times the tiles of K."""
    tile_m, tile_k = tile_coordinates(tl.program_id(0), tiles_m, tl.cdiv(K, BK))
    expert, row, end = find_expert(tile_m, ends_ptr, experts, BM, SIZE)
    if expert < experts:
        column = tile_k * BK
        channel = expert.to(tl.int64) * N
        acc_0, acc_1, acc_2, acc_3 = backward_tile(
            grad_ptr + row.to(tl.int64) * stride_gm, tl.minimum(tl.arange(0, BM), end - 1 - row) * stride_gm,
            packed_ptr + channel * (K // 4), scale_ptr + channel * (K // GROUP), column, K, N,
            0, tl.cdiv(N, BN), BM, BN, BK, GROUP, EVEN_N, PTX,
        )  # fmt: skip
        acc = in_order(
            tl.trans(acc_0), tl.trans(acc_1), tl.trans(acc_2), tl.trans(acc_3), BM, BK // 4
        )
        store_rows(acc, dx_ptr, row, column, end, K, BM, BK)


@triton.jit
def grouped_scaled_mm_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, ends_ptr, y_ptr, experts, tiles_m, M, N, K, stride_xm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    ACC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N]. The last tile of an expert also computes rows of the next expert, but does not store them."""
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tiles_m, tl.cdiv(N, BN))
    expert, row, end = find_expert(tile_m, ends_ptr, experts, BM, SIZE)
    if expert < experts:
        column = tile_n * BN
        acc = scaled_tile(
            x_ptr, w_ptr, row, expert * N + column, M, experts * N, K, stride_xm, 0, tl.cdiv(K, BK),
            BM, BN, BK, EVEN_K, TMA, FAST, ACC,
        )  # fmt: skip
        store_scaled(
            acc, x_scale_ptr, w_scale_ptr + expert * N, None, y_ptr, row, column, end, N, BM, BN
        )


def grouped_w4a16_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    token: torch.Tensor | None = None,
    batch_invariant: bool = False,
    dequantized: Copy | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W_e^T with each row's expert e, BF16 [M, N].

    x [M, K] BF16 sorted by expert, `packed` int32 [E, N, K/8], `scale` BF16 [E, N, K/g], `ends` int32 [E]. `ends` must
    ascend (repeats are allowed) and end with M. Raise ValueError in the case of `w4a16_linear`.

    token            int64 [M]: row i multiplies x[token[i]], and x [T, K] is not sorted
    batch_invariant  the bits of a row do not depend on the other rows
    dequantized      returns the BF16 weight [E, N, K] for the path that needs it, by default a new one
    """
    group, (experts, n, k) = group_size(packed, scale), _sizes(packed)
    m = len(x if token is None else token)
    operation = "grouped_w4a16_invariant" if batch_invariant else "grouped_w4a16"
    tile = tile or choose(operation, x.device, -(-m // experts))
    if token is not None and (tile is None or len(x) * x.stride(0) >= _FAR):
        x, token = x[token], None
    if tile is None:
        weight = dequantized() if dequantized else _dequantized(packed, scale)
        return F.grouped_mm(x.contiguous(), weight.mT, offs=ends)
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    x = adjacent(x)
    tiles_m = row_tiles(m, experts, tile.BM)
    launch(
        grouped_w4a16_kernel, (tiles_m * triton.cdiv(n, tile.BN),),
        x, token, packed.view(torch.int16), scale, ends, y, experts, tiles_m, n, k, x.stride(0),
        tile.BM, tile.BN, tile.BK, group, k % tile.BK == 0, PTX, _size(experts), **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y


def grouped_w4a16_backward_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    dequantized: Copy | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return dX = grad @ W_e, BF16 [M, K], from grad BF16 [M, N] sorted by expert.

    Other arguments and errors are those of `grouped_w4a16_linear`.
    """
    group, m, (experts, n, k) = group_size(packed, scale), len(grad), _sizes(packed)
    tile = tile or choose("grouped_w4a16_backward", grad.device, -(-m // experts))
    if tile is None:
        weight = dequantized() if dequantized else _dequantized(packed, scale)
        return F.grouped_mm(grad.contiguous(), weight, offs=ends)
    dx = torch.empty(m, k, dtype=torch.bfloat16, device=grad.device)
    grad = adjacent(grad)
    tiles_m = row_tiles(m, experts, tile.BM)
    launch(
        grouped_w4a16_backward_kernel, (tiles_m * triton.cdiv(k, tile.BK),),
        grad, packed.view(torch.int16), scale, ends, dx, experts, tiles_m, n, k, grad.stride(0),
        tile.BM, tile.BN, tile.BK, group, n % tile.BN == 0, PTX, _size(experts), **tile.launch, **LAUNCH,
    )  # fmt: skip
    return dx


def grouped_scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    fast_accumulation: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W_e^T with each row's expert e, BF16 [M, N], for 8-bit operands.

    x int8 or e4m3 [M, K] sorted by expert, FP32 scales [M, 1], weight of the same dtype [E, N, K], scales [E, N, 1],
    `ends` as in `grouped_w4a16_linear`.
    """
    (m, k), (experts, n, _), device = x.shape, weight.shape, x.device
    tile = tile or choose(f"grouped_{operation_of(x, fast_accumulation)}", device, -(-m // experts))
    assert tile is not None  # the last rule of an 8-bit operation has no bounds
    y = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    x = adjacent(x)
    flat = weight.flatten(0, 1)
    tiles_m = row_tiles(m, experts, tile.BM)
    tma = takes_tma(x, flat)
    launch(
        grouped_scaled_mm_kernel, (tiles_m * triton.cdiv(n, tile.BN),),
        TensorDescriptor.from_tensor(x, [tile.BM, tile.BK]) if tma else x,
        TensorDescriptor.from_tensor(flat, [tile.BN, tile.BK]) if tma else flat,
        x_scale, weight_scale, ends, y, experts, tiles_m, m, n, k, x.stride(0),
        tile.BM, tile.BN, tile.BK, k % tile.BK == 0, tma, fast_accumulation,
        tl.int32 if x.dtype == torch.int8 else tl.float32, _size(experts), **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y


def dequantized_stack(tensors: Tensors) -> torch.Tensor:
    """Return the BF16 weight [E, N, K] of low-bit wire tensors, in one pass over memory."""
    if "weight_packed" in tensors:
        return _dequantized(tensors["weight_packed"], tensors["weight_scale"])
    weight = tensors["weight"]
    rows = dequantize_rows(weight.flatten(0, 1), tensors["weight_scale"].flatten(0, 1))
    return rows.view(weight.shape)


def row_tiles(rows: int, experts: int, block: int) -> int:
    """Return the largest number of tiles of `block` rows that any division of `rows` among the experts can need."""
    return (rows + min(rows, experts) * (block - 1)) // block


def _sizes(packed: torch.Tensor) -> tuple[int, int, int]:
    """Return (E, N, K) of int32 [E, N, K/8]."""
    return packed.shape[0], packed.shape[1], packed.shape[2] * 8


def _dequantized(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_int4(packed.flatten(0, 1), scale.flatten(0, 1)).view(_sizes(packed))


def _size(experts: int) -> int:
    return triton.next_power_of_2(max(experts, 16))
