"""A fast 64-bit checksum of a tensor's bytes. Every device computes the same value.

The bytes are read as 64-bit words. There are three steps for each word:

1. Mix: XOR the upper half of the word into its lower half.
2. Multiply by an odd weight that depends on the word's position.
3. Mix again.

The results are added modulo 2**64. A long tensor is split into blocks of words, and the sums of the blocks are treated
like words.

Each step is one-to-one, so damage within one word is always found. Damage to several words is missed with a probability
of about 2**-32. (Without the mixing, flips of the top bits of two words would cancel.) The checksum detects accidents,
not attacks. `tensor_digest` of `qarl.checkpoint.folder` (SHA-256, computed on the CPU) also detects attacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

BLOCK = 4096  # words in a block; all blocks have the same weights, `weights(1, ...)`
CHUNK = 1 << 16  # words at a time on CPU, so that the intermediate tensors stay in the cache
_GPU_CHUNK = 1 << 22  # words at a time on a GPU: enough to fill it, and at most 64 MB of intermediate tensors
_LOWER = 0xFFFFFFFF


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the checksum of each tensor (any dtype, shape, strides and device)."""
    sums = [checksum(tensor.detach()) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(i)
    result = [0] * len(sums)
    for indices in by_device.values():
        for i, number in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            result[i] = number
    return result


def checksum(tensor: torch.Tensor) -> torch.Tensor:
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


def _words(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return the checksum of whole words, `data` uint8 [8 * words], plus `size`."""
    count, device = data.numel() // 8, data.device
    inner = weights(1, BLOCK, device)
    if count <= BLOCK:
        return _mixed(_as_words(data), inner[:count]).sum() + size
    total = torch.full((), size, dtype=torch.int64, device=device)
    step = CHUNK if device.type == "cpu" else _GPU_CHUNK
    outer = weights(2, 1 << (count // BLOCK).bit_length(), device)
    for start in range(0, count, step):
        chunk = _as_words(data[8 * start : 8 * (start + step)])
        first, rows = start // BLOCK, chunk.numel() // BLOCK
        if rows:
            sums = _mixed(chunk[: rows * BLOCK].view(rows, BLOCK), inner).sum(1)
            total = total + _mixed(sums, outer[first : first + rows]).sum()
        rest = chunk[rows * BLOCK :]
        if rest.numel():
            total = total + _mixed(_mixed(rest, inner[: rest.numel()]).sum(), outer[first + rows])
    return total


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """View bytes as int64. Bytes that do not begin at a multiple of 8 are copied."""
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _mixed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mix each word, multiply it by its weight, and mix it again. `_LOWER` clears the sign bits that `>>` copies in."""
    mixed = words >> 32
    mixed = mixed.bitwise_and_(_LOWER).bitwise_xor_(words).mul_(weights)
    return (mixed >> 32).bitwise_and_(_LOWER).bitwise_xor_(mixed)


def mix(words: torch.Tensor) -> torch.Tensor:
    """Mix contiguous words in place, in one operation on their halves. It needs a little-endian machine."""
    halves = words.view(-1).view(torch.int32)
    halves[::2].bitwise_xor_(halves[1::2])
    return words


@lru_cache(maxsize=64)
def weights(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` pseudorandom odd int64 numbers (splitmix64's finalizer, applied to consecutive numbers)."""
    if device.type != "cpu":
        return weights(seed, count, torch.device("cpu")).to(device)
    numbers = (torch.arange(count, dtype=torch.int64) + seed * (1 << 40)) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return numbers | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
