"""W8A8 and FP8 on a GPU: y = (x_q W_q^T * s_w) * s_x + b with int8 or e4m3 operands, scales per token and channel.

int8 products are summed exactly in int32, so tiles and splits do not change the bits. e4m3 products are summed in FP32.
The sum is scaled by the channel, then by the token, and the bias is added in a fused multiply-add. This is the order of
vLLM's CUTLASS kernels (csrc/quantization/w8a8/cutlass) and of its CPU kernels.

Hopper's e4m3 instructions keep about 14 bits of a sum. Therefore the sum of every BK products is added to FP32
registers, as in `torch._scaled_mm`. With `fast_accumulation` it stays in the tensor core, as in vLLM's CUTLASS kernels.

The weight is the first operand (acc is [N, M]), because tensor cores need 64 or more rows of the first operand. A
product has 2 M N K flops and moves K (M + N) + 2 M N bytes. On an H200 (4.3 TB/s, 1580 TFLOP/s) memory is the limit
below M = 184. There K is split over programs if there are few tiles. For larger M the L2 cache is the next limit, so
tiles are as large as the registers allow. M = 8192, K = 4096, N = 12288 takes 0.52 ms at the peak rate. Loads use the
tensor memory accelerator if the GPU has one (`TMA`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import INTERPRETED, LAUNCH, to_bf16, to_fp32
from qarl.kernels.triton.quantize import adjacent
from qarl.kernels.triton.tiles import (
    Tile,
    architecture,
    choose,
    leave_part,
    processors,
    split,
    sum_parts,
)


@triton.jit
def tile_coordinates(tile, tiles_m, tiles_n):
    """Return (row, column) of tile number `tile`.

    To reuse the L2 cache, tiles go column by column in bands of 8 rows.
    """
    band = tile // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    inside = tile % (8 * tiles_n)
    return band * 8 + inside % height, inside // height


@triton.jit
def multiply_8bit(w, x, acc, BK: tl.constexpr, FAST: tl.constexpr):
    """acc [BN, BM] + w [BN, BK] @ x [BM, BK]^T."""
    if FAST or acc.dtype == tl.int32:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=BK, out_dtype=acc.dtype)
    return acc


@triton.jit
def store_scaled(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    row,
    column,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """(acc * s_w) * s_x + bias -> y [M, N], from acc [BN, BM]."""
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    w_scale = tl.load(w_scale_ptr + columns, mask=columns < N, other=0.0)
    x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
    y = acc.to(tl.float32) * w_scale[:, None]
    x_scale = tl.broadcast_to(x_scale[None, :], (BN, BM))
    if bias_ptr is not None:
        bias = to_fp32(tl.load(bias_ptr + columns, mask=columns < N, other=0.0))
        y = tl.fma(y, x_scale, tl.broadcast_to(bias[:, None], (BN, BM)))
    else:
        y = y * x_scale
    mask = (rows < M)[None, :] & (columns < N)[:, None]
    tl.store(y_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None], to_bf16(y), mask=mask)


@triton.jit
def scaled_tile(
    x_ptr, w_ptr, row, column, M, N, K, stride_xm, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Return the sum [BN, BM] over blocks first..last-1 of K. With `TMA`, x_ptr and w_ptr are tensor descriptors."""
    acc = tl.zeros((BN, BM), ACC)
    if TMA:
        for step in range(first, last):
            x = x_ptr.load([row, step * BK])
            w = w_ptr.load([column, step * BK])
            acc = multiply_8bit(w, x, acc, BK, FAST)
    else:
        columns = tl.arange(0, BK)
        x_ptr += row.to(tl.int64) * stride_xm
        w_ptr += column.to(tl.int64) * K
        x_rows = tl.minimum(tl.arange(0, BM), M - 1 - row)[:, None] * stride_xm
        w_rows = tl.minimum(tl.arange(0, BN), N - 1 - column)[:, None] * K
        for step in range(first, last):
            offsets = (step * BK + columns)[None, :]
            if EVEN_K:
                x = tl.load(x_ptr + x_rows + offsets)
                w = tl.load(w_ptr + w_rows + offsets)
            else:
                x = tl.load(
                    x_ptr + x_rows + offsets,
                    mask=offsets < K,
                    other=0 if acc.dtype == tl.int32 else 0.0,
                )
                w = tl.load(
                    w_ptr + w_rows + offsets,
                    mask=offsets < K,
                    other=0 if acc.dtype == tl.int32 else 0.0,
                )
            acc = multiply_8bit(w, x, acc, BK, FAST)
    return acc


@triton.jit
def scaled_mm_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, workspace_ptr, counter_ptr, M, N, K, stride_xm, parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr,
    ACC: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N]. The grid is (tiles, parts).

    If PERSISTENT, the grid is (programs, 1), and a program computes every `programs`-th tile.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
            tile_m, tile_n = tile_coordinates(tile, tiles_m, tiles_n)
            row = tile_m * BM
            column = tile_n * BN
            acc = scaled_tile(
                x_ptr,
                w_ptr,
                row,
                column,
                M,
                N,
                K,
                stride_xm,
                0,
                blocks,
                BM,
                BN,
                BK,
                EVEN_K,
                TMA,
                FAST,
                ACC,
            )
            store_scaled(acc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, M, N, BM, BN)
    else:
        tile = tl.program_id(0)
        part = tl.program_id(1)
        share = tl.cdiv(blocks, parts)
        last = tl.minimum(part * share + share, blocks)
        tile_m, tile_n = tile_coordinates(tile, tiles_m, tiles_n)
        row = tile_m * BM
        column = tile_n * BN
        acc = scaled_tile(
            x_ptr,
            w_ptr,
            row,
            column,
            M,
            N,
            K,
            stride_xm,
            part * share,
            last,
            BM,
            BN,
            BK,
            EVEN_K,
            TMA,
            FAST,
            ACC,
        )
        if workspace_ptr is None:
            store_scaled(acc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, M, N, BM, BN)
        else:
            tiles = tl.num_programs(0)
            if leave_part(acc, workspace_ptr, counter_ptr, tile, tiles, part, parts, BN, BM):
                total = sum_parts(workspace_ptr, counter_ptr, tile, tiles, parts, BN, BM)
                store_scaled(
                    total, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, row, column, M, N, BM, BN
                )


def scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast_accumulation: bool = False,
    batch_invariant: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return BF16 [M, N] from 8-bit operands.

    x int8 or float8_e4m3fn [M, K] with FP32 scales [M, 1], weight [N, K] of the same dtype with scales [N, 1], bias
    BF16 [N]. Rows of x may be strided; all others are contiguous. `batch_invariant` is for e4m3. int8 gives the same
    bits with every tile, so it has no rules of its own.
    """
    operation = operation_of(x, fast_accumulation)
    batch_invariant &= x.dtype != torch.int8
    (m, k), n, device = x.shape, weight.shape[0], x.device
    tile = tile or choose(f"{operation}_invariant" if batch_invariant else operation, device, m)
    assert tile is not None  # the last rule of an 8-bit operation has no bounds
    y = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    x = adjacent(x)
    tiles = triton.cdiv(m, tile.BM) * triton.cdiv(n, tile.BN)
    programs = tiles
    persistent = tile.persistent(tiles, device)
    if persistent:
        programs = tile.per_sm * processors(device)
        count = 1
        workspace = None
        counter = None
    else:
        dtype = torch.int32 if operation == "w8a8" else torch.float32
        count, workspace, counter = split(
            tile, tiles, triton.cdiv(k, tile.BK), tile.BM * tile.BN, device, dtype
        )
    tma = takes_tma(x, weight)
    launch(
        scaled_mm_kernel, (programs, count),
        TensorDescriptor.from_tensor(x, [tile.BM, tile.BK]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tile.BN, tile.BK]) if tma else weight,
        x_scale, weight_scale, bias, y, workspace, counter, m, n, k, x.stride(0), count,
        tile.BM, tile.BN, tile.BK, k % tile.BK == 0, tma, fast_accumulation,
        tl.int32 if operation == "w8a8" else tl.float32, persistent, **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y


def takes_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the tensor memory accelerator can load x and weight: Hopper or later, and 16-byte aligned."""
    if not INTERPRETED and (architecture(x.device) == "ampere" or torch.version.hip is not None):
        return False
    strides = (*x.stride()[:-1], *weight.stride()[:-1])
    return (
        all(stride % 16 == 0 for stride in strides)
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def operation_of(x: torch.Tensor, fast_accumulation: bool) -> str:
    """Return the name in the tables of a product with the 8-bit activations x."""
    if x.dtype == torch.int8:
        return "w8a8"
    return "fp8_fast" if fast_accumulation else "fp8"
