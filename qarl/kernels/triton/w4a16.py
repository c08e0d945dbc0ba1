"""W4A16 on a GPU: y = x W^T + b (`w4a16_forward.py`) and dX = dY W (here), from packed int4 weights.

Each product has two paths. The tables (`tiles.json`) say up to how many rows M the first one is used:

- fused: the weight is dequantized in registers. This moves N K / 2 bytes of codes, 2 N K / g of
  scales (twice as many in the forward) and 2 M (N + K) of activations, for 2 M N K flops. On an H200 (4.3 TB/s, 790
  TFLOP/s) memory is the limit for M below 46. There it is faster because the weight has 3.9 times fewer bytes than in
  BF16 (g = 128).
- dequantized: one pass writes W as BF16 to a transient buffer of 2 N K bytes, and cuBLAS multiplies. The pass adds 3%
  to the time at M = 8192.

Both multiply the same BF16 operands and sum in FP32. They differ by the order of the sum and one BF16 rounding.

Few rows make few tiles, so several programs share a sum over K (N for dX). Their parts are added in a fixed order
(`tiles.py`), so the same inputs give the same bits. With `batch_invariant` there is one order over K and no split for
every M, so the bits of a row do not depend on the number of rows.

dX and the products of experts (`experts.py`), which share a tile, read the wire format. An int32 is read as two int16.
An int16 has the codes of k = 4h, 4h+1, 4h+2, 4h+3, lowest bits first. A tile of int16 gives four planes, one for each
position j in the int16. Plane j is multiplied by the activations at k = 4h + j. The forward's planes have adjacent
columns instead. Planes have three advantages over codes in the order of K:

- No data moves between threads. A tensor core takes BF16 operands as 32-bit registers of two adjacent values. Two
  adjacent int16 also fill one such register, and `(r >> 4j) & 0x000F000F` leaves their two codes in the right places.
- Four instructions make two weights. OR with 0x4300 makes 128 + code in BF16, and subtracting 136 makes code - 8, both
  exactly. Only the multiplication by the scale rounds, as in vLLM's CPU kernel and in Marlin.
- The weight is the first operand (acc is [N, M]), which Hopper's tensor cores can read from registers. The second
  operand may have as few as 8 rows of activations.

Legend: BM rows of activations or gradients, BN output channels, BK input channels, BH = BK / 4 int16, GROUP the group
size. Offsets inside a tile are 32 bits wide, so larger offsets are added to the pointer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import INTERPRETED, LAUNCH, dot, to_bf16, to_fp32
from qarl.kernels.triton.quantize import adjacent, dequantize_int4
from qarl.kernels.triton.tiles import Tile, choose, leave_part, split, sum_parts

PTX = not INTERPRETED and torch.version.hip is None
"""Whether the kernels may use NVIDIA's instructions."""


def _assembly(position: int) -> str:
    """Return PTX that makes two weights from the codes at `position` of two int16 ($1) and their scales ($2)."""
    shift = f"shr.b32 r, $1, {4 * position};" if position else "mov.b32 r, $1;"
    return f"""{{
    .reg .b32 r, one, bias, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 bias, 0xC308C308;
    mov.b32 zero, 0x80008000;
    {shift}
    lop3.b32 r, r, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 r, r, one, bias;
    fma.rn.bf16x2 $0, r, $2, zero;
    }}"""


_ASSEMBLY_0 = tl.constexpr(_assembly(0))
_ASSEMBLY_1 = tl.constexpr(_assembly(1))
_ASSEMBLY_2 = tl.constexpr(_assembly(2))
_ASSEMBLY_3 = tl.constexpr(_assembly(3))


@triton.jit
def plane(packed, scale, POSITION: tl.constexpr, PTX: tl.constexpr):
    """Return the BF16 weights of the codes at POSITION (0..3) in each int16 of `packed`.

    `scale`: of the shape of `packed`, BF16, or int32 with the scale in both halves. `PTX`: use NVIDIA's instructions
    (sm_80 and later). Triton's arithmetic gives the same values.
    """
    PAIRS: tl.constexpr = scale.dtype == tl.int32
    if not PTX:
        code = (packed.to(tl.int32) >> (4 * POSITION)) & 0xF
        return to_bf16((code - 8).to(tl.float32) * (of_pair(scale) if PAIRS else to_fp32(scale)))
    # Two scales in BF16 fill the register $2. Two pairs fill $2 and $3, which are equal.
    OPERANDS: tl.constexpr = "=r,r,r,r" if PAIRS else "=r,r,r"
    if POSITION == 0:
        return tl.inline_asm_elementwise(
            _ASSEMBLY_0, OPERANDS, [packed, scale], tl.bfloat16, is_pure=True, pack=2
        )
    if POSITION == 1:
        return tl.inline_asm_elementwise(
            _ASSEMBLY_1, OPERANDS, [packed, scale], tl.bfloat16, is_pure=True, pack=2
        )
    if POSITION == 2:
        return tl.inline_asm_elementwise(
            _ASSEMBLY_2, OPERANDS, [packed, scale], tl.bfloat16, is_pure=True, pack=2
        )
    return tl.inline_asm_elementwise(
        _ASSEMBLY_3, OPERANDS, [packed, scale], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def of_pair(pair):
    """Return the FP32 value of the scale in both halves of an int32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def by_position(tile, ROWS: tl.constexpr, BH: tl.constexpr):
    """[ROWS, 4 BH] -> four tiles [ROWS, BH]. Tile j has the columns 4h + j."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, BH, 2, 2)))
    tile_0, tile_2 = tl.split(even)
    tile_1, tile_3 = tl.split(odd)
    return tile_0, tile_1, tile_2, tile_3


@triton.jit
def in_order(tile_0, tile_1, tile_2, tile_3, ROWS: tl.constexpr, BH: tl.constexpr):
    """Invert `by_position`."""
    return tl.reshape(tl.join(tl.join(tile_0, tile_2), tl.join(tile_1, tile_3)), (ROWS, 4 * BH))


@triton.jit
def load_scales(
    scale_ptr, rows, step, groups, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr
):
    """Load the BF16 scales of block `step` of K: [BN] if a group spans the block, else [BN, BK / GROUP].

    `rows` [BN]: offset of each channel's first scale. Scales beyond the last group are zero.
    """
    if BK <= GROUP:
        scale = tl.load(scale_ptr + rows + step * BK // GROUP)
    else:
        group = step * (BK // GROUP) + tl.arange(0, BK // GROUP)
        offsets = rows[:, None] + group[None, :]
        if EVEN_K:
            scale = tl.load(scale_ptr + offsets)
        else:
            scale = tl.load(scale_ptr + offsets, mask=(group < groups)[None, :], other=0.0)
    return scale


@triton.jit
def load_row_scales(scale_ptr, rows, first, groups, COUNT: tl.constexpr):
    """Load the scales of groups first..first+COUNT-1 of the channels `rows` [BN]: [BN] if COUNT is 1, else [BN, COUNT].

    Groups beyond K get the scale of the last group.
    """
    if COUNT == 1:
        scale = tl.load(scale_ptr + rows * groups + tl.minimum(first, groups - 1))
    else:
        group = tl.minimum(first + tl.arange(0, COUNT), groups - 1)
        scale = tl.load(scale_ptr + rows[:, None] * groups + group[None, :])
    return scale


@triton.jit
def spread_scales(scale, ROWS: tl.constexpr, BH: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS] or [ROWS, COUNT] -> [ROWS, BH]: repeat each scale for every int16 of its group."""
    if COUNT == 1:
        spread = tl.broadcast_to(scale[:, None], (ROWS, BH))
    else:
        spread = tl.reshape(
            tl.broadcast_to(scale[:, :, None], (ROWS, COUNT, BH // COUNT)), (ROWS, BH)
        )
    return spread


@triton.jit
def forward_tile(
    x_ptr, x_rows, packed_ptr, scale_ptr, channels, K, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the transposed product over the blocks first..last-1 of K, FP32 [BN, BM].

    `x_ptr`, `packed_ptr` (int16) and `scale_ptr` point to the first row of this tile. `x_rows` [BM]: offsets of rows of
    x, in elements. `channels` [BN]: rows of the weight, counted from the tile's first row. All of these rows must
    exist.
    """
    BH: tl.constexpr = BK // 4
    COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
    groups = K // GROUP
    halves = tl.arange(0, BH)
    columns = tl.arange(0, BK)
    packed_rows = channels * (
        groups * (GROUP // 4)
    )  # K / 4, written so that the compiler knows its alignment
    scale_rows = channels * groups
    acc = tl.zeros((BN, BM), tl.float32)
    # Scales are too narrow for asynchronous copies. So each step loads the scales of the next one before it computes.
    scale = load_scales(scale_ptr, scale_rows, first, groups, BK, GROUP, EVEN_K)
    for step in range(first, last):
        offsets = packed_rows[:, None] + (step * BH + halves)[None, :]
        x_offsets = x_rows[:, None] + (step * BK + columns)[None, :]
        if EVEN_K:
            packed = tl.load(packed_ptr + offsets)
            x = tl.load(x_ptr + x_offsets)
        else:
            packed = tl.load(
                packed_ptr + offsets, mask=(step * BH + halves < K // 4)[None, :], other=0
            )
            x = tl.load(x_ptr + x_offsets, mask=(step * BK + columns < K)[None, :], other=0.0)
        spread = spread_scales(scale, BN, BH, COUNT)
        scale = load_scales(
            scale_ptr, scale_rows, tl.minimum(step + 1, last - 1), groups, BK, GROUP, EVEN_K
        )
        x_0, x_1, x_2, x_3 = by_position(x, BM, BH)
        acc = dot(plane(packed, spread, 0, PTX), tl.trans(x_0), acc)
        acc = dot(plane(packed, spread, 1, PTX), tl.trans(x_1), acc)
        acc = dot(plane(packed, spread, 2, PTX), tl.trans(x_2), acc)
        acc = dot(plane(packed, spread, 3, PTX), tl.trans(x_3), acc)
    return acc


@triton.jit
def backward_tile(
    grad_ptr, grad_rows, packed_ptr, scale_ptr, start, K, N, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return four FP32 [BH, BM] of dX = dY W, summed over blocks first..last-1 of N. Number j has the columns start +
    4h + j.

    `grad_ptr` points to the first row of this tile. `grad_rows` [BM]: offsets of rows of dY. All must exist.
    """
    BH: tl.constexpr = BK // 4
    COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
    groups = K // GROUP
    stride = groups * (GROUP // 4)  # K / 4, written so that the compiler knows its alignment
    halves = start // 4 + tl.arange(0, BH)
    inside = halves < stride
    channels = tl.arange(0, BN)
    acc_0 = tl.zeros((BH, BM), tl.float32)
    acc_1 = tl.zeros((BH, BM), tl.float32)
    acc_2 = tl.zeros((BH, BM), tl.float32)
    acc_3 = tl.zeros((BH, BM), tl.float32)
    scale = load_row_scales(
        scale_ptr, tl.minimum(first * BN + channels, N - 1), start // GROUP, groups, COUNT
    )
    for step in range(first, last):
        rows = step * BN + channels
        existing = rows if EVEN_N else tl.minimum(rows, N - 1)
        packed = tl.load(
            packed_ptr + existing[:, None] * stride + halves[None, :], mask=inside[None, :], other=0
        )
        if EVEN_N:
            grad = tl.load(grad_ptr + grad_rows[:, None] + rows[None, :])
        else:
            grad = tl.load(
                grad_ptr + grad_rows[:, None] + rows[None, :], mask=(rows < N)[None, :], other=0.0
            )
        spread = tl.trans(spread_scales(scale, BN, BH, COUNT))
        scale = load_row_scales(
            scale_ptr, tl.minimum(rows + BN, N - 1), start // GROUP, groups, COUNT
        )
        grad = tl.trans(grad)
        packed = tl.trans(packed)
        acc_0 = dot(plane(packed, spread, 0, PTX), grad, acc_0)
        acc_1 = dot(plane(packed, spread, 1, PTX), grad, acc_1)
        acc_2 = dot(plane(packed, spread, 2, PTX), grad, acc_2)
        acc_3 = dot(plane(packed, spread, 3, PTX), grad, acc_3)
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def store_forward(acc, bias_ptr, y_ptr, row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BN, BM] + bias -> y [M, N]."""
    rows = tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    mask = (row + rows < M)[None, :] & (columns < N)[:, None]
    tl.store(
        y_ptr + row.to(tl.int64) * N + rows[None, :] * N + columns[:, None], to_bf16(acc), mask=mask
    )


@triton.jit
def store_rows(acc, y_ptr, row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """acc [BM, BN] -> y [M, N]."""
    rows = tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    mask = (row + rows < M)[:, None] & (columns < N)[None, :]
    tl.store(
        y_ptr + row.to(tl.int64) * N + rows[:, None] * N + columns[None, :], to_bf16(acc), mask=mask
    )


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


def w4a16_backward_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return dX = grad W, BF16 [M, K], from grad BF16 [M, N].

    `packed` int32 [N, K/8], `scale` BF16 [N, K/g]. `tile` overrides the table (for tests and tuning). Raise
    ValueError if g is not a power of two, at least 8.
    """
    group, (m, n), k = group_size(packed, scale), grad.shape, packed.shape[1] * 8
    tile = tile or choose("w4a16_backward", grad.device, m)
    if tile is None:
        return grad @ dequantize_int4(packed, scale)
    dx = torch.empty(m, k, dtype=torch.bfloat16, device=grad.device)
    grad = adjacent(grad)
    tiles = triton.cdiv(m, tile.BM) * triton.cdiv(k, tile.BK)
    count, workspace, counter = split(
        tile, tiles, triton.cdiv(n, tile.BN), tile.BM * tile.BK, grad.device
    )
    launch(
        w4a16_backward_kernel, (tiles, count),
        grad, packed.view(torch.int16), scale, dx, workspace, counter, m, n, k, grad.stride(0), count,
        tile.BM, tile.BN, tile.BK, group, n % tile.BN == 0, PTX, **tile.launch, **LAUNCH,
    )  # fmt: skip
    return dx


def group_size(packed: torch.Tensor, scale: torch.Tensor, least: int = 8) -> int:
    """Return g of `packed` [..., N, K/8] and `scale` [..., N, K/g]. Raise ValueError if no tile has such groups."""
    group = packed.shape[-1] * 8 // scale.shape[-1]
    if group < least or group & (group - 1):
        raise ValueError(f"group size {group} is not a power of two from {least} on")
    return group
