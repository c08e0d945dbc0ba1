"""The checksum of a publish, and whether a tensor holds NaN or Inf, in one pass over the tensor where it lies.

`qarl.rollout.publish.checksum` defines the sum and has it in PyTorch, where each step writes a temporary. There the
traffic is 8 to 17 times the tensor. Here each byte is read once. Sums are modulo 2**64, so the order of the additions
does not matter, and the bits are those of PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch, processors
from qarl.kernels.triton.numbers import INTERPRETED, LAUNCH

_PER_PROCESSOR = 2
"""Programs for each multiprocessor, as many as its registers hold. Each keeps the weights of a block in them."""


@triton.jit
def _mixed(words, weights):
    """Mix, multiply and mix again; `>>` copies sign bits in, so the upper half is masked."""
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * weights
    return words ^ ((words >> 32) & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["count", "step"])
def checksum_kernel(
    words_ptr, inner_ptr, outer_ptr, result_ptr, count, step,
    MASK: tl.constexpr, CARRY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the checksum of `count` words to result[0], and set result[step] to 1 if a float is not finite.

    `MASK` drops the signs of the floats in a word, or is 0 if the words hold no floats. `CARRY` is such that adding it
    to a magnitude sets the bit of the sign exactly if the float is Inf or NaN, and carries nothing into the next float.

    Bytes per word: 8, at 3.3e12 B/s on H100.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    inner = tl.load(inner_ptr + offsets)
    magnitudes = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([1], tl.int64)
    for block in range(program, tl.cdiv(count, BLOCK), programs):
        at = block * BLOCK + offsets
        words = tl.load(words_ptr + at, mask=at < count, other=0)
        if MASK != 0:
            carried = (words & MASK) + CARRY
            magnitudes |= (carried | (carried >> 32)).to(
                tl.int32
            )  # both halves of a word have the same lanes
        part = tl.sum(_mixed(words, inner), axis=0, keep_dims=True)
        outer = tl.load(outer_ptr + block + tl.arange(0, 1))
        total += tl.where(count > BLOCK, _mixed(part, outer), part)
    total += tl.where(program == 0, count.to(tl.int64) * 8, 0)
    tl.atomic_add(result_ptr + tl.arange(0, 1), total, sem="relaxed")
    if MASK != 0:
        SIGNS: tl.constexpr = -(MASK & 0x7FFFFFFF) - 1
        bad = tl.max(((magnitudes & SIGNS) != 0).to(tl.int32), axis=0)
        tl.store(result_ptr + step, 1, mask=bad != 0)


@triton.jit(do_not_specialize=["count", "tensors"])
def checksum_rows_kernel(
    rows_ptr, inner_ptr, table_ptr, result_ptr, count, tensors, BLOCK: tl.constexpr
):
    """Add the checksum of one of `count` rows to result[0, tensor], and set result[1, tensor] if a float is not finite.

    Bytes per word: 8, at 3.3e12 B/s on H100, after the copy of the rows.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 1)
    table_ptr += row
    offsets = tl.arange(0, BLOCK)
    words = tl.load(rows_ptr + row * BLOCK + offsets)
    part = tl.sum(_mixed(words, tl.load(inner_ptr + offsets)), axis=0, keep_dims=True)
    outer = tl.load(table_ptr + count + lane)
    part = tl.where(outer != 0, _mixed(part, outer), part) + tl.load(table_ptr + 2 * count + lane)
    tl.atomic_add(result_ptr + tl.load(table_ptr + lane), part, sem="relaxed")
    mask = tl.load(table_ptr + 3 * count)
    carried = (words & mask) + tl.load(table_ptr + 4 * count)
    bad = tl.max(((carried & (mask ^ -1)) != 0).to(tl.int32), axis=0)
    tl.store(result_ptr + tensors + tl.load(table_ptr), 1, mask=bad != 0)


def add_checksum(
    tensor: torch.Tensor,
    inner: torch.Tensor,
    outer: torch.Tensor,
    result: torch.Tensor,
    nonfinite: tuple[torch.dtype, int, int] | None,
) -> None:
    """Add the checksum of `tensor` to `result[0]`, and write 1 to `result[1]` if it holds NaN or Inf.

    `tensor`: contiguous, of any dtype; a multiple of 8 bytes that begins at one. `inner`: int64, one weight per word of
    a block. `outer`: int64, one weight per block. `result`: int64 [2], zeros. `nonfinite`: how to read the floats, as
    `qarl.quant.quantize.FLOAT_BITS`, or None to leave `result[1]` alone.
    """
    block = len(inner)
    words = tensor.detach().view(-1).view(torch.int64)
    blocks = triton.cdiv(len(words), block)
    mask, carry = lanes(nonfinite)
    if blocks:
        grid = min(blocks, 2 if INTERPRETED else _PER_PROCESSOR * processors(words.device))
        launch(
            checksum_kernel, (grid,), words, inner, outer, result, len(words), result.stride(0),
            MASK=mask, CARRY=carry, BLOCK=block, num_warps=8, **LAUNCH,
        )  # fmt: skip


def add_row_checksums(
    rows: torch.Tensor, inner: torch.Tensor, table: torch.Tensor, result: torch.Tensor
) -> None:
    """Do the same for tensors whose words are copied into `rows` int64 [R, block], each padded with zeros.

    `table`: int64 [5, R]. For each row it has the tensor's place in `result` int64 [2, tensors]; the row's weight, or 0
    if the tensor has no other row; the bytes of the tensor, once; and `lanes`."""
    launch(
        checksum_rows_kernel, (len(rows),), rows, inner, table, result, len(rows), result.shape[1],
        BLOCK=len(inner), num_warps=8, **LAUNCH,
    )  # fmt: skip


def lanes(nonfinite: tuple[torch.dtype, int, int] | None) -> tuple[int, int]:
    """Return the mask of the magnitudes of all floats in a word, and what to add to them (0, 0 for no floats)."""
    if nonfinite is None:
        return 0, 0
    integer, magnitude_mask, smallest = nonfinite
    bits = 8 * integer.itemsize
    copies = sum(1 << start for start in range(0, 64, bits))
    return magnitude_mask * copies, ((1 << (bits - 1)) - smallest) * copies
