"""Stochastic rounding from FP32 to BF16 with random bits that depend only on seed, tensor, update and element.

The bits of an element are a hash of its position in the whole tensor and a key (SplitMix64: Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014). So the result depends neither on the number of ranks nor on
the device, and a resumed run needs only the number of updates. A `torch.Generator` would give an element different bits
on one rank and on four.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BLOCK = 2**24
"""Elements that are rounded at a time. The hash of one needs about 24 bytes."""
_BLOCK_ON_CPU = 2**16
"""Smaller blocks stay in a CPU's cache: on one core of a Xeon, 2**24 elements take 0.2 instead of 0.8 s."""
_NEIGHBOURS = 2**16
"""BF16 is the upper half of FP32, so neighbours are this number of bit patterns apart, for both signs."""


@dataclass(frozen=True)
class Region:
    """The elements of a rank: indices `start` to `stop` along dimension `dim` of a tensor of shape `shape`."""

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls(shape, 0, 0, shape[0] if shape else 1)

    def positions(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return the int64 positions of the region's elements `first` to `last` in the flattened whole tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        in_region = torch.arange(first, last, device=device)
        start = self.start * inner
        slab = (self.stop - self.start) * inner
        if self.dim == 0 or not slab:
            return in_region + start
        slabs_before = in_region.div(slab, rounding_mode="floor")
        in_slab = in_region - slabs_before * slab
        return slabs_before * (self.shape[self.dim] * inner) + start + in_slab


def rounding_key(seed: int, name: str, update: int) -> int:
    """Return the key of one update of one parameter."""
    key = 0
    for part in (seed, zlib.crc32(name.encode()), update):
        key = _mix(key ^ _mix((part + 1) * _GAMMA))
    return key


def stochastic_round(source: Tensor, key: int, region: Region | None = None) -> Tensor:
    """Round FP32 to BF16, up or down at random, with the probability that makes the expected value exact.

    For example, a value a quarter of the way between two BF16 neighbours is rounded to the farther one with probability
    1/4. Representable values, NaN and Inf are returned unchanged. Beyond the largest BF16 number the upper neighbour is
    Inf.

    Args:
        source: FP32, any shape.
        key: from `rounding_key`.
        region: which part of the whole tensor `source` is. Default: all of it.

    Returns:
        BF16 of the same shape.
    """
    region = region or Region.whole(tuple(source.shape))
    flat = source.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    size = _BLOCK_ON_CPU if source.device.type == "cpu" else _BLOCK
    for first in range(0, len(flat), size):
        exact = flat[first : first + size]
        last = first + len(exact)
        noise = random_bits(key, region.positions(first, last, source.device))
        bits = exact.view(torch.int32) + noise
        at_random = bits.bitwise_and_(-_NEIGHBOURS).view(torch.float32)
        rounded[first:last] = torch.where(exact.isfinite(), at_random, exact)
    return rounded.view(source.shape)


def random_bits(key: int, positions: Tensor) -> Tensor:
    """Return 16 random bits for each of `positions` (int64), as int32. Equal arguments give equal bits."""
    bits = positions.mul(_signed(_GAMMA)).add_(_signed(key))
    bits = _shifted(bits, 30).mul_(_signed(_FIRST))
    bits = _shifted(bits, 27).mul_(_signed(_SECOND))
    return (_shifted(bits, 31) >> 48).bitwise_and_(0xFFFF).to(torch.int32)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """bits ^ (bits >> by), with zeros shifted in. (torch shifts in the sign.)"""
    without_sign = (1 << (64 - by)) - 1
    return (bits >> by).bitwise_and_(without_sign).bitwise_xor_(bits)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a number below 2**64."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _mix(number: int) -> int:
    """SplitMix64's finalizer on a Python integer."""
    number %= 1 << 64
    number = (number ^ (number >> 30)) * _FIRST % (1 << 64)
    number = (number ^ (number >> 27)) * _SECOND % (1 << 64)
    return number ^ (number >> 31)
