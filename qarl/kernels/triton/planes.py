"""int4 codes in planes (`qarl.kernels.int4_planes`): made from the wire format, and dequantized to BF16.

Both are one pass over memory. A program has a whole row of blocks in reach, so a thread reads the four int16 that its
own nibbles come from again from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.int4_planes import BLOCK, PLANES
from qarl.kernels.triton.numbers import LAUNCH, to_bf16
from qarl.kernels.triton.w4a16 import of_pair

_HALVES = BLOCK // PLANES
"""int16 of a whole block."""
_A_PROGRAM = 16
"""Blocks that a program converts."""


@triton.jit
def to_planes_kernel(packed_ptr, planes_ptr, K, BLOCKS: tl.constexpr, HALVES: tl.constexpr):
    """A program converts `BLOCKS` blocks of a row. Bytes per code: 1, at 4.3e12 B/s on H200."""
    row = tl.program_id(0).to(tl.int64) * (K // 4)
    half = tl.program_id(1) * BLOCKS * HALVES + tl.arange(0, BLOCKS * HALVES)
    start = half // HALVES * HALVES
    count = tl.minimum(K // 4 - start, HALVES)  # int16 of this block
    inside = half < K // 4
    joined = tl.zeros([BLOCKS * HALVES], tl.int32)
    for position in tl.static_range(4):
        column = 4 * start + position * count + half - start
        word = tl.load(packed_ptr + row + column // 4, mask=inside, other=0).to(tl.int32)
        joined |= ((word >> (column % 4 * 4)) & 0xF) << (4 * position)
    tl.store(planes_ptr + row + half, joined.to(tl.int16), mask=inside)


@triton.jit
def dequantize_planes_kernel(
    planes_ptr, pairs_ptr, out_ptr, K, GROUP: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """A program dequantizes `BLOCKS` blocks of a row. Bytes per code: 1/2 + 2 / g + 2, at 4.3e12 B/s on H200."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1) * BLOCKS * HALVES + tl.arange(0, BLOCKS * HALVES)
    start = half // HALVES * HALVES
    count = tl.minimum(K // 4 - start, HALVES)
    inside = half < K // 4
    word = tl.load(planes_ptr + row * (K // 4) + half, mask=inside, other=0).to(tl.int32)
    for position in tl.static_range(4):
        column = 4 * start + position * count + half - start
        pair = tl.load(pairs_ptr + row * (K // GROUP) + column // GROUP, mask=inside, other=0)
        code = ((word >> (4 * position)) & 0xF) - 8
        tl.store(
            out_ptr + row * K + column, to_bf16(code.to(tl.float32) * of_pair(pair)), mask=inside
        )


def to_planes(packed: torch.Tensor) -> torch.Tensor:
    """Codes int32 [N, K/8] of the wire format -> planes, int32 [N, K/8]."""
    rows, words = packed.shape
    planes = torch.empty_like(packed, memory_format=torch.contiguous_format)
    launch(
        to_planes_kernel, (rows, triton.cdiv(2 * words, _A_PROGRAM * _HALVES)),
        packed.contiguous().view(torch.int16), planes.view(torch.int16), 8 * words,
        BLOCKS=_A_PROGRAM, HALVES=_HALVES, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return planes


def dequantize_planes(planes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Planes int32 [N, K/8] and pairs int32 [N, K/g] -> BF16 [N, K], the bits of `dequantize_int4`."""
    rows, words = planes.shape
    out = planes.new_empty(rows, 8 * words, dtype=torch.bfloat16)
    launch(
        dequantize_planes_kernel, (rows, triton.cdiv(2 * words, _A_PROGRAM * _HALVES)),
        planes.view(torch.int16), pairs, out, 8 * words,
        GROUP=8 * words // pairs.shape[1], BLOCKS=_A_PROGRAM, HALVES=_HALVES, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out
