"""A fast 64-bit checksum of a tensor's bytes, and checks of all tensors of a unit at once: checksums, NaN and Inf.

Every device computes the same checksum. The bytes are read as 64-bit words. There are three steps for each word:

1. Mix: XOR the upper half of the word into its lower half.
2. Multiply by an odd weight that depends on the word's position.
3. Mix again.

The results are added modulo 2**64. A long tensor is split into blocks of words, and the sums of the blocks are treated
like words.

Each step is one-to-one, so damage within one word is always found. Damage to several words is missed with a probability
of about 2**-32. (Without the mixing, flips of the top bits of two words would cancel.) The checksum detects accidents,
not attacks. `tensor_digest` of `qarl.checkpoint.resumable` (SHA-256, computed on the CPU) also detects attacks.

`unit_checksums` does not wait for the device: the caller reads the results of all units together. It has three ways,
which give the same bits:

    kernel   on a GPU: one launch reads a large tensor where it lies, another all small ones, which are copied into rows
             as below (`qarl.kernels.triton.checksum`)
    rows     on a CPU, or where Triton is not installed: the bytes of small tensors are copied behind each other into
             rows of `BLOCK` words, and a few operations on all rows give all results, because words of zeros add
             nothing
    each     all other tensors, such as those whose bytes do not fill words
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from qarl.kernels.base import is_gpu
from qarl.quant.quantize import FLOAT_BITS, has_nonfinite

BLOCK = 4096  # words in a block; all blocks have the same weights, `weights(1, ...)`
CHUNK = 1 << 16  # words at a time on CPU, so that the intermediate tensors stay in the cache
_GPU_CHUNK = (
    1 << 22
)  # words at a time on a GPU: enough to fill it, and at most 64 MB of intermediate tensors
_LOWER = 0xFFFFFFFF


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the checksum of each tensor (any dtype, shape, strides and device)."""
    sums = [checksum(tensor.detach()) for tensor in tensors]
    if not sums:
        return []
    device = max((part.device for part in sums), key=lambda part: part.type != "cpu")
    numbers: list[int] = torch.stack([part.to(device, non_blocking=True) for part in sums]).tolist()
    return numbers


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum as 0-d int64. It depends on the number of bytes, so trailing zeros change it."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    size = flat.numel()
    whole = size // 8 * 8
    total = _words(flat[:whole], size)
    if size > whole:
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: size - whole] = flat[whole:]
        total = total + _mixed(tail.view(torch.int64), weights(3, 1, flat.device)).sum()
    return total


def _words(data: Tensor, size: int) -> Tensor:
    """Return the checksum of whole words, `data` uint8 [8 * words], plus `size`."""
    count = data.numel() // 8
    device = data.device
    inner = weights(1, BLOCK, device)
    if count <= BLOCK:
        return _mixed(_as_words(data), inner[:count]).sum() + size
    total = torch.full((), size, dtype=torch.int64, device=device)
    step = CHUNK if device.type == "cpu" else _GPU_CHUNK
    outer = weights(2, 1 << (count // BLOCK).bit_length(), device)
    for start in range(0, count, step):
        chunk = _as_words(data[8 * start : 8 * (start + step)])
        first = start // BLOCK
        rows = chunk.numel() // BLOCK
        if rows:
            sums = _mixed(chunk[: rows * BLOCK].view(rows, BLOCK), inner).sum(1)
            total = total + _mixed(sums, outer[first : first + rows]).sum()
        rest = chunk[rows * BLOCK :]
        if rest.numel():
            total = total + _mixed(_mixed(rest, inner[: rest.numel()]).sum(), outer[first + rows])
    return total


def _as_words(data: Tensor) -> Tensor:
    """View bytes as int64. Bytes that do not begin at a multiple of 8 are copied."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _mixed(words: Tensor, weights: Tensor) -> Tensor:
    """Mix each word, multiply it by its weight, and mix it again. `_LOWER` clears the sign bits that `>>` copies in."""
    mixed = words >> 32
    mixed = mixed.bitwise_and_(_LOWER).bitwise_xor_(words).mul_(weights)
    return (mixed >> 32).bitwise_and_(_LOWER).bitwise_xor_(mixed)


def mix(words: Tensor) -> Tensor:
    """Mix contiguous words in place, in one operation on their halves. It needs a little-endian machine."""
    halves = words.view(-1).view(torch.int32)
    halves[::2].bitwise_xor_(halves[1::2])
    return words


@lru_cache(maxsize=64)
def weights(seed: int, count: int, device: torch.device) -> Tensor:
    """Return `count` pseudorandom odd int64 numbers (splitmix64's finalizer, applied to consecutive numbers)."""
    if device.type != "cpu":
        return weights(seed, count, torch.device("cpu")).to(device)
    numbers = (torch.arange(count, dtype=torch.int64) + seed * (1 << 40)) * _signed(
        0x9E3779B97F4A7C15
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return numbers | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_LARGEST = 1 << 28
"""Bytes of a tensor on a GPU up to which it is copied into rows. A whole stack of experts may be larger."""
_SMALL = 1 << 20
"""Bytes up to which the kernel gets a copy. Half of a layer's tensors are small, with 1% of its bytes. Experts' stacks
are never copied, so a layer takes as many launches with few experts as with many."""
_ROW = 8 * BLOCK
"""Bytes of a row."""


class _Plan(NamedTuple):
    """How tensors of given sizes are laid out in rows. `counts`: the rows of each tensor. `start`: int64 [2, tensors],
    the sizes and zeros. `owners`, `outer` and `several` have a number per row: the tensor, the weight of the row in it,
    and whether it has other rows."""

    counts: tuple[int, ...]
    start: Tensor
    owners: Tensor
    outer: Tensor
    several: Tensor


@lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], device: torch.device) -> _Plan:
    rows = torch.tensor([max(-(-size // _ROW), 1) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), rows)
    row_numbers = torch.arange(len(owners)) - (rows.cumsum(0) - rows)[owners]
    outer = weights(2, 1 << int(rows.max()).bit_length(), torch.device("cpu"))[row_numbers]
    start = torch.tensor([sizes, [0] * len(sizes)])
    return _Plan(
        tuple(rows.tolist()),
        *(part.to(device) for part in (start, owners, outer, (rows > 1)[owners])),
    )


@lru_cache(maxsize=8)
def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(_ROW, dtype=torch.uint8, device=device)


def unit_checksums(tensors: Sequence[Tensor], *, finite: bool = False) -> Tensor:
    """Return int64 [2, tensors]: the checksums, and if `finite`, a number other than 0 for each tensor that contains
    NaN or Inf. It is on the device of most tensors."""
    groups: dict[tuple[torch.device, str], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _way(tensor)), []).append(i)
    device = max((device for device, _ in groups), key=lambda candidate: candidate.type != "cpu")
    results = []
    for (_, way), numbers in groups.items():
        if way == "rows":
            numbers.sort(key=lambda i: str(tensors[i].dtype))
        results.append(
            _WAYS[way]([tensors[i].detach() for i in numbers], finite).to(device, non_blocking=True)
        )
    together = torch.cat(results, 1) if len(results) > 1 else results[0]
    order = tuple(i for numbers in groups.values() for i in numbers)
    return together if order == tuple(range(len(tensors))) else together[:, _inverse(order, device)]


@lru_cache(maxsize=1024)
def _inverse(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order).argsort().to(device)


def _way(tensor: Tensor) -> str:
    if tensor.nbytes % 8 or (tensor.is_floating_point() and tensor.dtype not in FLOAT_BITS):
        return "each"
    aligned = tensor.storage_offset() * tensor.itemsize % 8 == 0
    if is_gpu(tensor.device) and aligned and _has_kernel(tensor.device):
        return "kernel"
    return (
        "rows"
        if tensor.nbytes <= (8 * CHUNK if tensor.device.type == "cpu" else _LARGEST)
        else "each"
    )


@cache
def _has_kernel(device: torch.device) -> bool:
    """Return whether the kernel can be used on `device`. On a real GPU it must first agree with PyTorch there."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "meta":
        return True
    words = torch.arange(3 * BLOCK + 5, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1
    floats = torch.ones(1024, dtype=torch.bfloat16, device=device)
    stack = (
        torch.arange(3 * 5 * 2048, device=device).view(3, 5, 2048).bfloat16()
    )  # several blocks, read in place
    samples = [words, floats, torch.where(floats.cumsum(0) == 700, torch.inf, floats)]
    samples += [stack, torch.where(stack == stack[2, 4, 2000], torch.inf, stack)]
    try:
        agrees = torch.equal(_check_by_kernel(samples, True), _check_each(samples, True))
        why = "its results differ from PyTorch's"
    except Exception as error:  # Triton, its compiler and the driver raise many types
        agrees = False
        why = f"{type(error).__name__}: {error}"
    if not agrees:
        warnings.warn(
            f"publishes on {device} compute checksums with PyTorch, not with the kernel: {why}",
            stacklevel=2,
        )
    return agrees


def _check_by_kernel(tensors: Sequence[Tensor], finite: bool) -> Tensor:
    """Read large tensors where they lie, and small ones together, in copied rows."""
    from qarl.kernels.triton.checksum import add_checksum, add_row_checksums

    device = tensors[0].device
    inner = weights(1, BLOCK, device)
    results = torch.zeros(2, len(tensors), dtype=torch.int64, device=device)
    small: list[int] = []
    for i, tensor in enumerate(tensors):
        if tensor.nbytes <= _SMALL and tensor.ndim < 3:
            small.append(i)
            continue
        outer = weights(2, 1 << (tensor.nbytes // _ROW).bit_length(), device)
        add_checksum(
            tensor.contiguous(),
            inner,
            outer,
            results[:, i],
            FLOAT_BITS.get(tensor.dtype) if finite else None,
        )
    if small:
        sizes = tuple(tensors[i].nbytes for i in small)
        table = _row_table(
            tuple(small), sizes, tuple(tensors[i].dtype if finite else None for i in small), device
        )
        rows = _rows([tensors[i] for i in small], _plan(sizes, torch.device("cpu")).counts)
        add_row_checksums(rows, inner, table, results)
    return results


@lru_cache(maxsize=1024)
def _row_table(
    numbers: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    device: torch.device,
) -> Tensor:
    """Return the table of `add_row_checksums`. `numbers`: the index of each tensor among all."""
    from qarl.kernels.triton.checksum import lanes

    plan = _plan(sizes, torch.device("cpu"))
    lanes_of = torch.tensor([lanes(FLOAT_BITS.get(dtype) if dtype else None) for dtype in dtypes])
    first = plan.owners.diff(prepend=torch.tensor([-1])) != 0
    rows = [
        torch.tensor(numbers)[plan.owners],
        plan.outer * plan.several,
        plan.start[0, plan.owners] * first,
    ]
    return torch.stack([*rows, *lanes_of[plan.owners].t()]).to(device)


def _check_each(tensors: Sequence[Tensor], finite: bool) -> Tensor:
    digests = torch.stack([checksum(tensor) for tensor in tensors])
    good = torch.zeros((), dtype=torch.bool, device=digests.device)
    bad = [
        has_nonfinite(t) if finite and t.is_floating_point() and t.numel() else good
        for t in tensors
    ]
    return torch.stack((digests, torch.stack(bad)))


def _rows(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Copy the bytes of `tensors` behind each other into rows of `BLOCK` words. `counts`: the rows of each tensor."""
    zeros = _zeros(tensors[0].device)
    parts = []
    for tensor, count in zip(tensors, counts, strict=True):
        parts += [
            tensor.contiguous().view(-1).view(torch.uint8),
            zeros[: count * _ROW - tensor.nbytes],
        ]
    return torch.cat(parts).view(torch.int64).view(-1, BLOCK)


def _check_rows(tensors: Sequence[Tensor], finite: bool) -> Tensor:
    """`tensors` are on one device, in the order of their dtypes."""
    device = tensors[0].device
    plan = _plan(tuple(tensor.nbytes for tensor in tensors), device)
    rows = _rows(tensors, plan.counts)
    results = plan.start.clone()
    end = 0
    for dtype, group in groupby(
        zip(tensors, plan.counts, strict=True), key=lambda pair: pair[0].dtype
    ):
        start = end
        end = end + sum(count for _, count in group)
        if finite and (bits := FLOAT_BITS.get(dtype)):
            wrong = (rows[start:end].view(bits.integer) & bits.magnitude_mask).amax(
                1
            ) >= bits.nonfinite
            results[1].index_add_(0, plan.owners[start:end], wrong.long())
    sums = mix(mix(rows).mul_(weights(1, BLOCK, device))).sum(1)
    again = mix(mix(sums.clone()).mul_(plan.outer))
    results[0].index_add_(0, plan.owners, torch.where(plan.several, again, sums))
    return results


_WAYS = {"kernel": _check_by_kernel, "rows": _check_rows, "each": _check_each}


def nonfinite_by_kernel(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return, as bool [tensors], which of these float tensors of one device contain NaN or Inf, or None if the kernel
    cannot read one of them."""
    if not all(_way(tensor) == "kernel" for tensor in tensors):
        return None
    return _check_by_kernel(tensors, True)[1] != 0
