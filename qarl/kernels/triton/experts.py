"""Mixture-of-experts layers in Triton: grouped products, and what an expert layer does between them.

Rows are sorted by expert (`qarl.kernels.experts.Routing`), and each expert's weight multiplies only its own
rows. Expert e has the rows ends[e-1]..ends[e]-1 of x. `ends` is int32 [E] on the device, as in PyTorch's `grouped_mm`.
There is no padding: an expert with c rows has ceil(c / BM) tiles. The host does not know their number without waiting
for the device. So the grid has as many programs as any routing of M rows to E experts could need. A program finds its
expert by a cumulative sum over the E counts, and exits if there is none.

Tiles, bytes and flops are those of the dense products (`w4a16.py`, `scaled_mm.py`), but sums are not split, and
weights of experts without rows are not read. For W4A16 with many rows per expert, all experts are dequantized to a
transient BF16 buffer for PyTorch's grouped product. This choice depends only on M / E, the mean number of rows, so
routing cannot change it.

Between the products there are SwiGLU's backward, the sum over a token's experts, and zeros for unused experts. Each is
one pass over memory. In PyTorch, the FP32 temporaries of these chains would be several times as large as their inputs
and outputs. Arithmetic is in FP32, and results are rounded once to BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import LAUNCH, e4m3_value, has_e4m3, round_bf16, to_bf16, to_fp32
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
    x_ptr, packed_ptr, scale_ptr, ends_ptr, y_ptr, experts, tiles_m, N, K, stride_xm,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N]. The grid is `tiles_m` row tiles, used or not, times the tiles of N."""
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tiles_m, tl.cdiv(N, BN))
    expert, row, end = find_expert(tile_m, ends_ptr, experts, BM, SIZE)
    if expert < experts:
        column = tile_n * BN
        channel = expert.to(tl.int64) * N + column
        acc = forward_tile(
            x_ptr + row.to(tl.int64) * stride_xm, tl.minimum(tl.arange(0, BM), end - 1 - row) * stride_xm,
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
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W_e^T with each row's expert e, BF16 [M, N].

    x [M, K] BF16 sorted by expert, `packed` int32 [E, N, K/8], `scale` BF16 [E, N, K/g], `ends` int32 [E]. `ends` must
    ascend (repeats are allowed) and end with M. Raise ValueError in the case of `w4a16_linear`.
    """
    group, m, (experts, n, k) = group_size(packed, scale), len(x), _sizes(packed)
    tile = tile or choose("grouped_w4a16", x.device, -(-m // experts))
    if tile is None:
        return F.grouped_mm(x.contiguous(), _dequantized(packed, scale).mT, offs=ends)
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    x = adjacent(x)
    tiles_m = row_tiles(m, experts, tile.BM)
    launch(
        grouped_w4a16_kernel, (tiles_m * triton.cdiv(n, tile.BN),),
        x, packed.view(torch.int16), scale, ends, y, experts, tiles_m, n, k, x.stride(0),
        tile.BM, tile.BN, tile.BK, group, k % tile.BK == 0, PTX, _size(experts), **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y


def grouped_w4a16_backward_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return dX = grad @ W_e, BF16 [M, K], from grad BF16 [M, N] sorted by expert.

    Other arguments and errors are those of `grouped_w4a16_linear`.
    """
    group, m, (experts, n, k) = group_size(packed, scale), len(grad), _sizes(packed)
    tile = tile or choose("grouped_w4a16_backward", grad.device, -(-m // experts))
    if tile is None:
        return F.grouped_mm(grad.contiguous(), _dequantized(packed, scale), offs=ends)
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


def grouped_scaled_backward_input(
    grad: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return grad @ W_e, BF16 [M, K].

    grad BF16 [M, N] sorted by expert, int8 or e4m3 weight [E, N, K], scales [E, N, 1]. All experts are dequantized to a
    transient BF16 buffer for PyTorch's grouped product.
    """
    dequantized = dequantize_rows(weight.flatten(0, 1), weight_scale.flatten(0, 1))
    return F.grouped_mm(grad.contiguous(), dequantized.view(weight.shape), offs=ends)


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


_PROGRAMS = 32  # that write zeros for an expert without rows


class SwigluGradients(NamedTuple):
    """`hidden` BF16 [M, 2I]: of gate and up. `router` FP32 [M]: of the routing weights, in the order of `topk_ids`.

    `weighted` BF16 [M, I] or None: the routing weight times the input of down_proj.
    """

    hidden: torch.Tensor
    router: torch.Tensor
    weighted: torch.Tensor | None


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, a_ptr, a_scale_ptr, weight_ptr, order_ptr, hidden_ptr, router_ptr, weighted_ptr, cols,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes one row.

    Bytes per element of grad: 10, + 1 for a quantized `a`, + 2 for `weighted`, at 4.3e12 B/s on H200.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weight_ptr + slot)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < cols
        grad = to_fp32(tl.load(grad_ptr + row * cols + column, mask=inside, other=0.0))
        gate = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + column, mask=inside, other=0.0))
        up = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + cols + column, mask=inside, other=0.0))
        divisor = 1.0 + tl.exp(-gate)
        sigmoid = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        silu = gate * sigmoid
        if QUANTIZED:
            code = tl.load(a_ptr + row * cols + column, mask=inside, other=0)
            value = e4m3_value(code, HARDWARE) if FP8 else code.to(tl.float32)
            a = round_bf16(value * tl.load(a_scale_ptr + row))
        else:
            a = round_bf16(round_bf16(silu) * up)
        dot += grad * a
        if WEIGHTED:
            tl.store(weighted_ptr + row * cols + column, to_bf16(a * weight), mask=inside)
        grad = grad * weight
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(hidden_ptr + row * 2 * cols + column, to_bf16(grad * up * slope), mask=inside)
        tl.store(hidden_ptr + row * 2 * cols + cols + column, to_bf16(grad * silu), mask=inside)
    tl.store(router_ptr + slot, tl.sum(dot, axis=0))


@triton.jit
def combine_kernel(rows_ptr, slot_ptr, y_ptr, cols, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums one block of a token's rows. Bytes per element: 2 * TOP_K + 2, at 4.3e12 B/s on H200."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        row = tl.load(slot_ptr + token * TOP_K + choice)
        total += to_fp32(tl.load(rows_ptr + row * cols + column, mask=column < cols, other=0.0))
    tl.store(y_ptr + token * cols + column, to_bf16(total), mask=column < cols)


@triton.jit
def clear_unused_kernel(stack_ptr, ends_ptr, size, programs, BLOCK: tl.constexpr):
    """Write zeros for an expert without rows. `size`: numbers per expert."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends_ptr + expert) == begin:
        start = stack_ptr + expert.to(tl.int64) * size
        for block in range(tl.program_id(1) * BLOCK, size, programs * BLOCK):
            column = block + tl.arange(0, BLOCK)
            tl.store(
                start + column, tl.zeros([BLOCK], stack_ptr.dtype.element_ty), mask=column < size
            )


def swiglu_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    a: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    *,
    weighted: bool,
) -> SwigluGradients:
    """Return the gradients from `grad` [M, I], the gradient of down_proj's input before the routing weight.

    `grad` and `gate_up` [M, 2I], gate first, are BF16. `a` int8 or e4m3 [M, I] with FP32 scales [M, 1] is down_proj's
    input. If it is None, it is silu(gate) * up. `weights` FP32 [M] in the order of `topk_ids`, and `order` int64 [M] as
    in `Routing`.
    """
    rows, cols = grad.shape
    fp8 = a is not None and a.dtype == torch.float8_e4m3fn
    grad = grad.contiguous()
    gate_up = gate_up.contiguous()
    weights = weights.contiguous()
    hidden = torch.empty_like(gate_up)
    router = torch.empty_like(weights)
    product = torch.empty_like(grad) if weighted else None
    codes = grad if a is None else a.contiguous()
    launch(
        swiglu_backward_kernel, (rows,),
        grad, gate_up, codes.view(torch.uint8) if fp8 else codes, weights if a is None else a_scale, weights, order,
        hidden, router, hidden if product is None else product, cols, QUANTIZED=a is not None, FP8=fp8,
        HARDWARE=has_e4m3(grad.device), WEIGHTED=weighted, BLOCK=min(triton.next_power_of_2(cols), 1024),
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    return SwigluGradients(hidden, router, product)


def combine(rows: torch.Tensor, slot: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum BF16 `rows` [T k, N] in FP32 -> BF16 [T, N]. Token t has the rows `slot`[t k], ..., `slot`[t k + k - 1].

    They are added in this order. `slot` is int64 [T k].
    """
    y = rows.new_empty(len(rows) // top_k, rows.shape[1])
    cols = rows.shape[1]
    block = min(triton.next_power_of_2(cols), 1024)
    launch(
        combine_kernel, (len(y), triton.cdiv(cols, block)), rows.contiguous(), slot.contiguous(), y, cols,
        TOP_K=top_k, BLOCK=block, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return y


def clear_unused(stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Write zeros, in place, for experts of the contiguous `stack` [E, N, K] without rows; `ends` int32 [E] as in
    `Routing`. Other experts are neither read nor written. Return `stack`."""
    launch(
        clear_unused_kernel, (len(stack), _PROGRAMS), stack, ends, stack[0].numel(), _PROGRAMS,
        BLOCK=1024, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return stack
