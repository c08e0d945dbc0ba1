"""Quantize weights in one pass, bit for bit like qarl.quant.quantize. Dequantize them to BF16, and convert Marlin's
int4 layout (`qarl.kernels.int4`) to the wire format. Quantize activations with one scale per token.

As in qarl.quant.quantize, every step is rounded to the weight's dtype. For FP32 every quotient is an IEEE division. For
BF16 the code multiplies by the reciprocal, which is cheaper and gives the same bits. (The quotient of two 8-bit
significands is at least 2**-17, relative, away from the middle of two BF16 numbers. The product's error is at most
2**-21.)

A kernel that finds a NaN or an Inf in a weight does not stop. It stores 1 to a flag, which the caller reads once for
all weights. Values and scales are then invalid.

Activations have the arithmetic of vLLM's CUDA operators (`qarl.kernels.reference` has it in PyTorch), with one
exception. vLLM ignores a NaN in the maximum (fmaxf). Here a NaN or Inf in a row makes its scale NaN or Inf, so the NaN
is not lost. One program quantizes each row, for every M, so results do not depend on the batch.

The wrappers expect operands that fit, as the quantizer and the layers make them.

Rooflines assume the H200's copy bandwidth of 4.3 TB/s. vLLM and compressed-tensors have no such kernels. They quantize
weights in eight or more passes of PyTorch, and PyTorch needs nine for the way back from Marlin's layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import (
    LAUNCH,
    e4m3_bits,
    e4m3_value,
    has_e4m3,
    round_bf16,
    to_bf16,
    to_fp32,
)

_INT_BITS = tl.constexpr(12582912.0)  # x + this has round-half-even(x) in its low bits
_CONSTANTS = tl.constexpr(0x3F400000)  # the bits of _INT_BITS times 0x11111111, modulo 2**32
WEIGHT_TILE = 4096
_ROW_TILE = 8192
_HALF_RANGE = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}


@triton.jit
def _grid_scale(absmax, HALF_RANGE: tl.constexpr, BF16_GRID: tl.constexpr):
    """Return absmax / HALF_RANGE in FP32, rounded to the weight's dtype. A scale of zero becomes the dtype's eps."""
    if BF16_GRID:
        scale = round_bf16(absmax * (1.0 / HALF_RANGE))
        scale = tl.where(scale == 0.0, 0.0078125, scale)
    else:
        scale = tl.div_rn(absmax, tl.full(absmax.shape, HALF_RANGE, tl.float32))
        scale = tl.where(scale == 0.0, 1.1920928955078125e-07, scale)
    return scale


@triton.jit
def _factors(scale):
    """Return (p, r) such that (w * p) * r rounds to the same BF16 number as w / scale.

    p keeps r finite if the scale is tiny.
    """
    power = tl.where(scale < 1.1754943508222875e-38, 18446744073709551616.0, 1.0)
    return power, 1.0 / (scale * power)


@triton.jit
def quantize_int4_kernel(
    w_ptr, packed_ptr, scale_ptr, flag_ptr, groups, groups_per_row, row_stride,
    GROUP: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr, CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """A program quantizes `GROUPS` whole groups, as [GROUPS, WORDS, 8].

    A thread has the eight codes of an int32, so packing moves nothing between threads. `WORDS` is GROUP / 8, rounded up
    to a power of two. `CONTIGUOUS`: rows follow each other in memory, so no division is needed to find a group's row.

    Bytes per element: w (2 or 4) + 1/2 + 2 / GROUP, at 4.3e12 B/s on H200.
    """
    BF16_GRID: tl.constexpr = w_ptr.dtype.element_ty == tl.bfloat16
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    group = index.to(tl.int64)
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, 8)
    if CONTIGUOUS:
        start = group * GROUP
    else:
        row = index // groups_per_row
        start = row.to(tl.int64) * row_stride + (index - row * groups_per_row) * GROUP
    exists = index < groups
    words_exist = exists[:, None] & (word < GROUP // 8)[None, :]
    mask = words_exist[:, :, None] & (lane < 8)[None, None, :]
    inside = word[None, :, None] * 8 + lane[None, None, :]
    w = to_fp32(tl.load(w_ptr + start[:, None, None] + inside, mask=mask, other=0.0))
    magnitude = tl.max(tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)
    tl.store(flag_ptr + group * 0, tl.full([GROUPS], 1, tl.int32), mask=magnitude >= 0x7F800000)
    scale = _grid_scale(magnitude.to(tl.float32, bitcast=True), 7.5, BF16_GRID)
    if BF16_GRID:
        power, reciprocal = _factors(scale)
        q = round_bf16((w * power[:, None, None]) * reciprocal[:, None, None])
    else:
        q = tl.div_rn(w, tl.broadcast_to(scale[:, None, None], w.shape))
    shifted = tl.minimum(tl.maximum(q, -8.0), 7.0) + (_INT_BITS + 8.0)
    # The bits are those of the constant plus code + 8, which is in 0..15. So the eight codes can be shifted and added
    # without a carry from one to the next. The sum of the eight constants is subtracted at the end.
    packed = (
        tl.sum(shifted.to(tl.int32, bitcast=True) << (lane * 4)[None, None, :], axis=2) - _CONSTANTS
    )
    tl.store(packed_ptr + group[:, None] * (GROUP // 8) + word[None, :], packed, mask=words_exist)
    tl.store(scale_ptr + group, to_bf16(scale) if BF16_GRID else scale, mask=exists)


@triton.jit
def _magnitude(x):
    """Return the bits of |x| as int32. They sort like the numbers, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _row_codes(w, scale, FP8: tl.constexpr, HARDWARE: tl.constexpr, BF16_GRID: tl.constexpr):
    """Return the codes, int8 or e4m3 stored as uint8."""
    if BF16_GRID:
        power, reciprocal = _factors(scale)
        q = round_bf16((w * power) * reciprocal)
    else:
        q = tl.div_rn(w, tl.broadcast_to(scale, w.shape))
    if FP8:
        codes = e4m3_bits(tl.minimum(tl.maximum(q + 0.0, -448.0), 448.0), HARDWARE)
    else:
        shifted = tl.minimum(tl.maximum(q, -128.0), 127.0) + _INT_BITS
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_rows_kernel(
    w_ptr, values_ptr, scale_ptr, flag_ptr, cols, row_stride,
    HALF_RANGE: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Quantize one row. A row of one block (`SINGLE`) stays in registers. A longer one is read a second time.

    Bytes per element: w (2 or 4) + 1, at 4.3e12 B/s on H200.
    """
    BF16_GRID: tl.constexpr = w_ptr.dtype.element_ty == tl.bfloat16
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * row_stride
    column = tl.arange(0, BLOCK)
    w = to_fp32(tl.load(w_ptr + column, mask=column < cols, other=0.0))
    largest = _magnitude(w)
    if not SINGLE:
        for start in range(BLOCK, cols, BLOCK):
            w = to_fp32(tl.load(w_ptr + start + column, mask=start + column < cols, other=0.0))
            largest = tl.maximum(largest, _magnitude(w))
    magnitude = tl.max(largest, axis=0)
    tl.store(flag_ptr, 1, mask=magnitude >= 0x7F800000)
    scale = _grid_scale(magnitude.to(tl.float32, bitcast=True), HALF_RANGE, BF16_GRID)
    tl.store(scale_ptr + row, scale)
    out = row * cols + column
    if SINGLE:
        tl.store(
            values_ptr + out, _row_codes(w, scale, FP8, HARDWARE, BF16_GRID), mask=column < cols
        )
    else:
        for start in range(0, cols, BLOCK):
            w = to_fp32(tl.load(w_ptr + start + column, mask=start + column < cols, other=0.0))
            codes = _row_codes(w, scale, FP8, HARDWARE, BF16_GRID)
            tl.store(values_ptr + out + start, codes, mask=start + column < cols)


@triton.jit
def dequantize_int4_kernel(
    packed_ptr, scale_ptr, out_ptr, words, WORDS_PER_GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """A program dequantizes `BLOCK` int32. A thread reads 4 bytes and writes 16.

    Bytes per element: 1/2 + 2 / g + 2, at 4.3e12 B/s on H200. [12288, 4096] takes 30 us.
    """
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, 8)
    exists = word < words
    packed = tl.load(packed_ptr + word, mask=exists, other=0)
    scale = to_fp32(tl.load(scale_ptr + word // WORDS_PER_GROUP, mask=exists, other=0.0))
    code = ((packed[:, None] >> (lane * 4)[None, :]) & 0xF) - 8
    value = to_bf16(code.to(tl.float32) * scale[:, None])
    tl.store(
        out_ptr + word[:, None] * 8 + lane[None, :],
        value,
        mask=exists[:, None] & (lane < 8)[None, :],
    )


@triton.jit
def dequantize_rows_kernel(
    values_ptr,
    scale_ptr,
    out_ptr,
    cols,
    row_stride,
    FP8: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program dequantizes one block of a row. Bytes per element: 1 + 2, at 4.3e12 B/s on H200."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(values_ptr + row * row_stride + column, mask=column < cols, other=0)
    value = e4m3_value(code, HARDWARE) if FP8 else code.to(tl.float32)
    tl.store(
        out_ptr + row * cols + column, to_bf16(value * tl.load(scale_ptr + row)), mask=column < cols
    )


def quantize_int4(
    weight: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weight` [N, K], BF16 or FP32 -> int32 [N, K/8], scales [N, K/group_size] in its dtype, and the flag, int32 [1].

    `group_size` is a multiple of 8 that divides K.
    """
    weight = adjacent(weight.detach())
    rows, cols = weight.shape
    groups = rows * (cols // group_size)
    packed = weight.new_empty(rows, cols // 8, dtype=torch.int32)
    scale = weight.new_empty(rows, cols // group_size)
    flag = weight.new_zeros(1, dtype=torch.int32)
    words = triton.next_power_of_2(group_size // 8)
    a_program = max(WEIGHT_TILE // (words * 8), 1)
    launch(
        quantize_int4_kernel, (triton.cdiv(groups, a_program),),
        weight, packed, scale, flag, groups, cols // group_size, weight.stride(0), GROUP=group_size, WORDS=words,
        GROUPS=a_program, CONTIGUOUS=weight.is_contiguous(), num_warps=4 if words < 512 else 8, **LAUNCH,
    )  # fmt: skip
    return packed, scale, flag


def quantize_rows(
    weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weight` [N, K] as in `quantize_int4` -> `dtype` [N, K] (int8 or e4m3), FP32 scales [N, 1], and the flag."""
    weight = adjacent(weight.detach())
    rows, cols = weight.shape
    values = weight.new_empty(rows, cols, dtype=dtype)
    scale = weight.new_empty(rows, 1, dtype=torch.float32)
    flag = weight.new_zeros(1, dtype=torch.int32)
    block, warps = row_block(cols)
    launch(
        quantize_rows_kernel, (rows,),
        weight, _storage(values), scale, flag, cols, weight.stride(0), HALF_RANGE=_HALF_RANGE[dtype],
        FP8=dtype != torch.int8, HARDWARE=has_e4m3(weight.device), BLOCK=block, SINGLE=cols <= block,
        num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return values, scale, flag


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8] and BF16 or FP32 [N, K/g] -> BF16 [N, K], as `qarl.kernels.int4.dequantize_int4`."""
    rows, words_a_row = packed.shape
    out = packed.new_empty(rows, words_a_row * 8, dtype=torch.bfloat16)
    launch(
        dequantize_int4_kernel, (triton.cdiv(packed.numel(), 512),),
        packed.contiguous(), scale.contiguous(), out, packed.numel(),
        WORDS_PER_GROUP=words_a_row // scale.shape[1], BLOCK=512, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 or float8_e4m3fn [N, K], rows may be strided, and FP32 [N, 1] -> BF16 [N, K], the product rounded once.

    For weights and activations. The result equals that of `qarl.kernels.base.dequantize`.
    """
    rows, cols = values.shape
    out = values.new_empty(rows, cols, dtype=torch.bfloat16)
    if values.numel():
        values = adjacent(values)
        block = min(triton.next_power_of_2(cols), 2048)
        launch(
            dequantize_rows_kernel, (rows, triton.cdiv(cols, block)),
            _storage(values), scale.contiguous(), out, cols, values.stride(0), FP8=values.dtype != torch.int8,
            HARDWARE=has_e4m3(values.device), BLOCK=block, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, K] with the elements of a row next to each other. Rows may be strided."""
    return x if x.stride(1) == 1 else x.contiguous()


def row_block(cols: int) -> tuple[int, int]:
    """Return (block, warps) for kernels in which a program quantizes a row.

    Rows of up to 8192 columns are one block, with 32 elements per thread. Longer rows use blocks of 4096, because a
    power of two wastes more: for 18944 columns, 32768 instead of 20480.
    """
    block = triton.next_power_of_2(cols) if cols <= _ROW_TILE else _ROW_TILE // 2
    return block, min(max(block // 1024, 1), 8)


def _storage(values: torch.Tensor) -> torch.Tensor:
    """View e4m3 as bytes, because Triton rejects e4m3 on GPUs that do not support it."""
    return values if values.dtype == torch.int8 else values.view(torch.uint8)


_MARLIN_TILES = 16


@triton.jit
def codes_from_marlin_kernel(codes_ptr, packed_ptr, tiles, row_blocks, TILES: tl.constexpr):
    """A program converts 64 rows of `TILES` tiles of 16 columns. Bytes per code: 1, at 4.3e12 B/s on H200."""
    block = tl.program_id(0).to(tl.int64)  # of all experts
    expert = block // row_blocks
    block_of_expert = block % row_blocks
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, 32)
    inside = tile[None, :] < tiles
    source = codes_ptr + expert * tiles * row_blocks * 128 + block_of_expert * 128
    offset = (lane // 4 * 16 + lane % 4)[:, None] + tile[None, :].to(tl.int64) * row_blocks * 128
    first_row = block * 64 + lane % 4 * 16 + lane // 4
    for b in tl.static_range(2):
        low = tl.zeros([32, TILES], tl.int32)
        high = tl.zeros([32, TILES], tl.int32)
        for q in tl.static_range(4):
            word = tl.load(source + offset + 4 * q, mask=inside, other=0)
            for o in tl.static_range(2):
                pair = word >> (16 * o + 8 * b)
                low |= (pair & 0xF) << (8 * q + 4 * o)
                high |= ((pair >> 4) & 0xF) << (8 * q + 4 * o)
        words = tl.reshape(tl.join(low, high), (32, 2 * TILES))
        column = tl.program_id(1) * 2 * TILES + tl.arange(0, 2 * TILES)
        target = packed_ptr + (first_row + 8 * b)[:, None] * (2 * tiles) + column[None, :]
        tl.store(target, words, mask=column[None, :] < 2 * tiles)


def codes_from_marlin(codes: torch.Tensor) -> torch.Tensor:
    """int32 [E, K/16, 2N] in Marlin's layout -> int32 [E, N, K/8] in the wire format."""
    experts, tiles, words = codes.shape
    packed = codes.new_empty(experts, words // 2, 2 * tiles)
    row_blocks = words // 128
    launch(
        codes_from_marlin_kernel, (experts * row_blocks, triton.cdiv(tiles, _MARLIN_TILES)),
        codes.contiguous(), packed, tiles, row_blocks, TILES=_MARLIN_TILES, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return packed


@triton.jit
def _scale(magnitude, FP8: tl.constexpr):
    """Return the scale and a factor f from the bits of the row's maximum. Codes are x * f (int8) or x / f (e4m3)."""
    amax = magnitude.to(tl.float32, bitcast=True)
    if FP8:
        scale = tl.div_rn(amax, 448.0)
        scale = tl.where(scale < 4.359654192014924e-06, 4.359654192014924e-06, scale)
        return scale, scale
    factor = tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, amax))
    return tl.div_rn(amax, 127.0), tl.where(
        factor > 3.4028234663852886e38, 3.4028234663852886e38, factor
    )


@triton.jit
def _codes(x, factor, FP8: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the codes of x, int8 or e4m3 as uint8."""
    if FP8:
        q = tl.div_rn(x, tl.broadcast_to(factor, x.shape))
        codes = e4m3_bits(tl.minimum(tl.maximum(q, -448.0), 448.0), HARDWARE)
    else:
        shifted = tl.minimum(tl.maximum(x * factor, -128.0), 127.0) + _INT_BITS
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_tokens_kernel(
    x_ptr, values_ptr, scale_ptr, cols, row_stride,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Quantize one row, as in `quantize_rows_kernel`. Bytes per element: 2 + 1, at 4.3e12 B/s on H200."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    column = tl.arange(0, BLOCK)
    out = row * cols + column
    x = to_fp32(tl.load(x_ptr + column, mask=column < cols, other=0.0))
    largest = _magnitude(x)
    if not SINGLE:
        for start in range(BLOCK, cols, BLOCK):
            x = to_fp32(tl.load(x_ptr + start + column, mask=start + column < cols, other=0.0))
            largest = tl.maximum(largest, _magnitude(x))
    scale, factor = _scale(tl.max(largest, axis=0), FP8)
    tl.store(scale_ptr + row, scale)
    if SINGLE:
        tl.store(values_ptr + out, _codes(x, factor, FP8, HARDWARE), mask=column < cols)
    else:
        for start in range(0, cols, BLOCK):
            x = to_fp32(tl.load(x_ptr + start + column, mask=start + column < cols, other=0.0))
            tl.store(
                values_ptr + out + start,
                _codes(x, factor, FP8, HARDWARE),
                mask=start + column < cols,
            )


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [M, K], rows may be strided -> (`dtype` [M, K], FP32 scales [M, 1]).

    `dtype`: torch.int8 (as `quantize_int8_cuda`) or torch.float8_e4m3fn (as `quantize_fp8_cuda`).
    """
    x = adjacent(x.detach())
    values = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    if x.shape[0]:
        block, warps = row_block(x.shape[1])
        launch(
            quantize_tokens_kernel, (x.shape[0],),
            x, _storage(values), scale, x.shape[1], x.stride(0), FP8=dtype != torch.int8,
            HARDWARE=has_e4m3(x.device), BLOCK=block, SINGLE=x.shape[1] <= block, num_warps=warps, **LAUNCH,
        )  # fmt: skip
    return values, scale
