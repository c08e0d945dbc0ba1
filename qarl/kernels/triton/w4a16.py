"""W4A16 on a GPU: y = x W^T + b and dX = dY W, from the packed int4 weight of the wire.

Each product has two paths. The tables (`tables.py`) say up to how many rows M the first one is used:

- fused: the weight is dequantized in registers (`_int4_tile.py`). This moves N K / 2 bytes of codes, 2 N K / g of
  scales and 2 M (N + K) of activations, for 2 M N K flops. On an H200 (4.3 TB/s, 790 TFLOP/s) memory is the limit for M
  below 46. There it is faster because the weight has 3.9 times fewer bytes than in BF16 (g = 128).
- dequantized: one pass writes W as BF16 to a transient buffer of 2 N K bytes, and cuBLAS multiplies. The pass adds 3%
  to the time at M = 8192.

Both multiply the same BF16 operands and sum in FP32. They differ by the order of the sum and one BF16 rounding.

Few rows make few tiles, so several programs share a sum over K (N for dX). Their parts are added in a fixed order
(`_compat.py`), so the same inputs give the same bits. With `batch_invariant` there is one tile and no split for every
M, so the bits of a row do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from qarl.kernels.device import launch
from qarl.kernels.triton._compat import (
    INTERPRETED,
    LAUNCH,
    leave_part,
    require,
    require_device,
    split,
    sum_parts,
    to_bf16,
)
from qarl.kernels.triton._int4_tile import backward_tile, forward_tile, in_order
from qarl.kernels.triton.quantize import dequantize_int4
from qarl.kernels.triton.tables import Tile, choose

PTX = not INTERPRETED and torch.version.hip is None
"""Whether the kernels may use NVIDIA's instructions."""


@triton.jit
def store_forward(acc, bias_ptr, y_ptr, row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BN, BM] + bias -> y [M, N]."""
    rows = tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    mask = (row + rows < M)[None, :] & (columns < N)[:, None]
    tl.store(y_ptr + row.to(tl.int64) * N + rows[None, :] * N + columns[:, None], to_bf16(acc), mask=mask)


@triton.jit
def store_rows(acc, y_ptr, row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BM, BN] -> y [M, N]."""
    rows = tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    mask = (row + rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_ptr + row.to(tl.int64) * N + rows[:, None] * N + columns[None, :], to_bf16(acc), mask=mask)


@triton.jit
def w4a16_kernel(
    x_ptr, packed_ptr, scale_ptr, bias_ptr, y_ptr, workspace_ptr, counter_ptr, M, N, K, stride_xm, parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The grid is (tiles, parts). Adjacent programs share a tile of the weight. Without workspace, parts is 1."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_m = tl.cdiv(M, BM)
    row = (tile % tiles_m) * BM
    column = (tile // tiles_m) * BN
    x_rows = tl.minimum(tl.arange(0, BM), M - 1 - row) * stride_xm
    channels = tl.minimum(tl.arange(0, BN), N - 1 - column)
    blocks = tl.cdiv(K, BK)
    share = tl.cdiv(blocks, parts)
    acc = forward_tile(
        x_ptr + row.to(tl.int64) * stride_xm, x_rows,
        packed_ptr + column.to(tl.int64) * (K // 4), scale_ptr + column.to(tl.int64) * (K // GROUP), channels,
        K, part * share, tl.minimum(part * share + share, blocks), BM, BN, BK, GROUP, EVEN_K, PTX,
    )  # fmt: skip
    if workspace_ptr is None:
        store_forward(acc, bias_ptr, y_ptr, row, column, M, N, BM, BN)
    else:
        tiles = tl.num_programs(0)
        if leave_part(acc, workspace_ptr, counter_ptr, tile, tiles, part, parts, BN, BM):
            total = sum_parts(workspace_ptr, counter_ptr, tile, tiles, parts, BN, BM)
            store_forward(total, bias_ptr, y_ptr, row, column, M, N, BM, BN)


@triton.jit
def w4a16_backward_kernel(
    grad_ptr, packed_ptr, scale_ptr, dx_ptr, workspace_ptr, counter_ptr, M, N, K, stride_gm, parts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute dX [M, K] in tiles of BM by BK, summed over N in steps of BN. The grid is (tiles, parts)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    tiles_m = tl.cdiv(M, BM)
    row = (tile % tiles_m) * BM
    column = (tile // tiles_m) * BK
    grad_rows = tl.minimum(tl.arange(0, BM), M - 1 - row) * stride_gm
    blocks = tl.cdiv(N, BN)
    share = tl.cdiv(blocks, parts)
    acc_0, acc_1, acc_2, acc_3 = backward_tile(
        grad_ptr + row.to(tl.int64) * stride_gm, grad_rows, packed_ptr, scale_ptr, column, K, N,
        part * share, tl.minimum(part * share + share, blocks), BM, BN, BK, GROUP, EVEN_N, PTX,
    )  # fmt: skip
    acc = in_order(tl.trans(acc_0), tl.trans(acc_1), tl.trans(acc_2), tl.trans(acc_3), BM, BK // 4)
    if workspace_ptr is None:
        store_rows(acc, dx_ptr, row, column, M, K, BM, BK)
    else:
        tiles = tl.num_programs(0)
        if leave_part(acc, workspace_ptr, counter_ptr, tile, tiles, part, parts, BM, BK):
            total = sum_parts(workspace_ptr, counter_ptr, tile, tiles, parts, BM, BK)
            store_rows(total, dx_ptr, row, column, M, K, BM, BK)


def w4a16_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return x W^T + b, BF16 [M, N].

    x [M, K] BF16 (rows may be strided), `packed` int32 [N, K/8], `scale` BF16 [N, K/g], bias BF16 [N]. g is a power of
    two, at least 8. `tile` overrides the table (for tests and tuning). Raise ValueError for any other shape, dtype or
    stride.
    """
    group = check_weight(packed, scale)
    (n, _), (m, k) = packed.shape, check_rows(x, packed.shape[1] * 8, packed)
    if bias is not None:
        require(bias.shape == (n,) and bias.dtype == torch.bfloat16, f"bias must be bfloat16 [{n}]")
        require_device(bias, packed)
        bias = bias.contiguous()
    tile = tile or choose("w4a16_invariant" if batch_invariant else "w4a16", x.device, m, n, k, group)
    if tile is None:
        return F.linear(x, dequantize_int4(packed, scale), bias)
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    if not y.numel():
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = triton.cdiv(m, tile.BM) * triton.cdiv(n, tile.BN)
    count, workspace, counter = split(tile, tiles, triton.cdiv(k, tile.BK), tile.BM * tile.BN, x.device)
    launch(
        w4a16_kernel, (tiles, count),
        x, packed.view(torch.int16), scale, bias, y, workspace, counter, m, n, k, x.stride(0), count,
        tile.BM, tile.BN, tile.BK, group, k % tile.BK == 0, PTX, **tile.launch, **LAUNCH,
    )  # fmt: skip
    return y


def w4a16_backward_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    batch_invariant: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return dX = grad W, BF16 [M, K], from grad BF16 [M, N]. Arguments and errors are those of `w4a16_linear`."""
    group = check_weight(packed, scale)
    n, k = packed.shape[0], packed.shape[1] * 8
    m, _ = check_rows(grad, n, packed)
    operation = "w4a16_backward_invariant" if batch_invariant else "w4a16_backward"
    tile = tile or choose(operation, grad.device, m, n, k, group)
    if tile is None:
        return grad @ dequantize_int4(packed, scale)
    dx = torch.empty(m, k, dtype=torch.bfloat16, device=grad.device)
    if not dx.numel():
        return dx
    if not n:
        return dx.zero_()
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    tiles = triton.cdiv(m, tile.BM) * triton.cdiv(k, tile.BK)
    count, workspace, counter = split(tile, tiles, triton.cdiv(n, tile.BN), tile.BM * tile.BK, grad.device)
    launch(
        w4a16_backward_kernel, (tiles, count),
        grad, packed.view(torch.int16), scale, dx, workspace, counter, m, n, k, grad.stride(0), count,
        tile.BM, tile.BN, tile.BK, group, n % tile.BN == 0, PTX, **tile.launch, **LAUNCH,
    )  # fmt: skip
    return dx


def check_weight(packed: torch.Tensor, scale: torch.Tensor) -> int:
    """Return the group size of `packed` [..., N, K/8] and `scale` [..., N, K/g]. Raise ValueError if they don't fit."""
    require(packed.dtype == torch.int32 and packed.ndim >= 2, "weight_packed must be int32 [N, K/8]")
    require(scale.dtype == torch.bfloat16, f"weight_scale must be bfloat16, not {scale.dtype}")
    require(scale.shape[:-1] == packed.shape[:-1], "weight_packed and weight_scale have different channels")
    require(packed.is_contiguous() and scale.is_contiguous(), "weight_packed and weight_scale must be contiguous")
    k = packed.shape[-1] * 8
    require(k > 0 and scale.shape[-1] > 0 and k % scale.shape[-1] == 0, "weight_scale does not divide K into groups")
    group = k // scale.shape[-1]
    require(group >= 8 and group & (group - 1) == 0, f"group size {group} is not a power of two from 8 on")
    require_device(packed, scale)
    return group


def check_rows(x: torch.Tensor, width: int, packed: torch.Tensor) -> torch.Size:
    """Return the shape of x. Raise ValueError if x is not BF16 [M, width] on the device of `packed`."""
    require(x.ndim == 2 and x.shape[1] == width, f"expected [M, {width}], got {list(x.shape)}")
    require(x.dtype == torch.bfloat16, f"expected bfloat16 rows, got {x.dtype}")
    require_device(x, packed)
    return x.shape
