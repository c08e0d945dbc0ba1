"""One output tile of the W4A16 products, computed from the packed weight. Dense and grouped kernels share it.

An int32 of the wire format is read as two int16. An int16 has the codes of k = 4h, 4h+1, 4h+2, 4h+3, lowest bits first.
A tile of int16 gives four planes, one for each position j in the int16. Plane j is multiplied by the activations at k =
4h + j. This has three advantages over codes in the order of K:

- No data moves between threads. A tensor core takes BF16 operands as 32-bit registers of two adjacent values. Two
  adjacent int16 also fill one such register, and `(r >> 4j) & 0x000F000F` leaves their two codes in the right places.
- Four instructions make two weights. OR with 0x4300 makes 128 + code in BF16, and subtracting 136 makes code - 8, both
  exactly. Only the multiplication by the scale rounds, as in vLLM's CPU kernel and in Marlin.
- The weight is the first operand (acc is [N, M]), which Hopper's tensor cores can read from registers. So the
  dequantized tile never goes through shared memory. The second operand may have as few as 8 rows of activations.

Legend: BM rows of activations or gradients, BN output channels, BK input channels, BH = BK / 4 int16, GROUP the group
size. Offsets inside a tile are 32 bits wide, so larger offsets are added to the pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl.kernels.triton._compat import dot, to_bf16, to_fp32


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

    `scale`: BF16, of the shape of `packed`. `PTX`: use NVIDIA's instructions (sm_80 and later). Triton's arithmetic
    gives the same values.
    """
    if not PTX:
        code = (packed.to(tl.int32) >> (4 * POSITION)) & 0xF
        return to_bf16((code - 8).to(tl.float32) * to_fp32(scale))
    if POSITION == 0:
        return tl.inline_asm_elementwise(_ASSEMBLY_0, "=r,r,r", [packed, scale], tl.bfloat16, is_pure=True, pack=2)
    if POSITION == 1:
        return tl.inline_asm_elementwise(_ASSEMBLY_1, "=r,r,r", [packed, scale], tl.bfloat16, is_pure=True, pack=2)
    if POSITION == 2:
        return tl.inline_asm_elementwise(_ASSEMBLY_2, "=r,r,r", [packed, scale], tl.bfloat16, is_pure=True, pack=2)
    return tl.inline_asm_elementwise(_ASSEMBLY_3, "=r,r,r", [packed, scale], tl.bfloat16, is_pure=True, pack=2)


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
def load_scales(scale_ptr, rows, step, groups, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr):
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
        spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, COUNT, BH // COUNT)), (ROWS, BH))
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
    packed_rows = channels * (groups * (GROUP // 4))  # K / 4, written so that the compiler knows its alignment
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
            packed = tl.load(packed_ptr + offsets, mask=(step * BH + halves < K // 4)[None, :], other=0)
            x = tl.load(x_ptr + x_offsets, mask=(step * BK + columns < K)[None, :], other=0.0)
        spread = spread_scales(scale, BN, BH, COUNT)
        scale = load_scales(scale_ptr, scale_rows, tl.minimum(step + 1, last - 1), groups, BK, GROUP, EVEN_K)
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
    scale = load_row_scales(scale_ptr, tl.minimum(first * BN + channels, N - 1), start // GROUP, groups, COUNT)
    for step in range(first, last):
        rows = step * BN + channels
        existing = rows if EVEN_N else tl.minimum(rows, N - 1)
        packed = tl.load(packed_ptr + existing[:, None] * stride + halves[None, :], mask=inside[None, :], other=0)
        if EVEN_N:
            grad = tl.load(grad_ptr + grad_rows[:, None] + rows[None, :])
        else:
            grad = tl.load(grad_ptr + grad_rows[:, None] + rows[None, :], mask=(rows < N)[None, :], other=0.0)
        spread = tl.trans(spread_scales(scale, BN, BH, COUNT))
        scale = load_row_scales(scale_ptr, tl.minimum(rows + BN, N - 1), start // GROUP, groups, COUNT)
        grad = tl.trans(grad)
        packed = tl.trans(packed)
        acc_0 = dot(plane(packed, spread, 0, PTX), grad, acc_0)
        acc_1 = dot(plane(packed, spread, 1, PTX), grad, acc_1)
        acc_2 = dot(plane(packed, spread, 2, PTX), grad, acc_2)
        acc_3 = dot(plane(packed, spread, 3, PTX), grad, acc_3)
    return acc_0, acc_1, acc_2, acc_3
