"""Checks of all tensors of a unit at once: their checksums, and whether they contain NaN or Inf.

A decoder layer has some twenty tensors, most of them small. Checked one by one, they take hundreds of kernels and a
wait for the device per layer. So their bytes are copied behind each other into rows of `BLOCK` words. A few operations
on all rows then give the checksums of `qarl.rollout.publish.checksum`, bit for bit, because words of zeros add nothing.
Nothing here waits for the device: the caller reads the results of all units together.

Tensors that are large, or whose bytes do not fill words, are checked by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from qarl.quant.quantize import FLOAT_BITS
from qarl.rollout.publish.checksum import BLOCK, CHUNK, checksum, mix, weights

_LARGEST = 1 << 28
"""Bytes of a tensor on a GPU up to which it is copied. A layer of 128 experts of Qwen3-30B-A3B has 201 MB in W4A16."""
_ZEROS = 8 * BLOCK


class Checked(NamedTuple):
    """`digests`: int64 [tensors], on the device of most tensors. `bad`: bool, one per row of floats, or None if it was
    not asked for. `owners`: the number of the tensor of each of these rows."""

    digests: torch.Tensor
    bad: torch.Tensor | None
    owners: torch.Tensor | None


class _Plan(NamedTuple):
    """How tensors of given sizes are laid out. `owners`, `outer` and `several` have a number per row: the tensor, the
    weight of the row in it, and whether it has other rows."""

    padding: tuple[int, ...]
    sizes: torch.Tensor
    owners: torch.Tensor
    outer: torch.Tensor
    several: torch.Tensor


@lru_cache(maxsize=1024)
def _plan(sizes: tuple[int, ...], device: torch.device) -> _Plan:
    rows = torch.tensor([max(-(-size // (8 * BLOCK)), 1) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), rows)
    places = torch.arange(len(owners)) - (rows.cumsum(0) - rows)[owners]
    outer = weights(2, 1 << int(rows.max()).bit_length(), torch.device("cpu"))[places]
    padding = tuple(8 * BLOCK * int(count) - size for count, size in zip(rows, sizes, strict=True))
    return _Plan(padding, *(one.to(device) for one in (torch.tensor(sizes), owners, outer, (rows > 1)[owners])))


@lru_cache(maxsize=8)
def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(_ZEROS, dtype=torch.uint8, device=device)


def check_unit(tensors: Sequence[torch.Tensor], *, finite: bool = False) -> Checked:
    """Return the checksums of `tensors`, and if `finite`, which of them contain NaN or Inf."""
    groups: dict[tuple[torch.device, bool], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _is_copied(tensor)), []).append(i)
    device = max((device for device, _ in groups), key=lambda one: one.type != "cpu")
    digests, bad, owners = [], [], []
    for (_, copied), numbers in groups.items():
        numbers.sort(key=lambda i: str(tensors[i].dtype))
        found = _check_rows([tensors[i] for i in numbers], finite) if copied else _check_each(tensors, numbers, finite)
        digests.append(found.digests.to(device, non_blocking=True))
        if found.bad is not None and found.owners is not None:
            bad.append(found.bad.to(device, non_blocking=True))
            owners.append(_order(tuple(numbers), device)[found.owners.to(device, non_blocking=True)])
    places = tuple(i for numbers in groups.values() for i in numbers)
    together = torch.cat(digests) if len(digests) > 1 else digests[0]
    if places != tuple(range(len(tensors))):
        together = torch.empty_like(together).index_copy_(0, _order(places, device), together)
    return Checked(together, torch.cat(bad) if bad else None, torch.cat(owners) if owners else None)


def _is_copied(tensor: torch.Tensor) -> bool:
    most = 8 * CHUNK if tensor.device.type == "cpu" else _LARGEST
    return tensor.nbytes % 8 == 0 and tensor.nbytes <= most


@lru_cache(maxsize=1024)
def _order(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


def _check_each(tensors: Sequence[torch.Tensor], numbers: list[int], finite: bool) -> Checked:
    digests = torch.stack([checksum(tensors[i].detach()) for i in numbers])
    floats = [place for place, i in enumerate(numbers) if finite and tensors[i].is_floating_point()]
    if not floats:
        return Checked(digests, None, None)
    bad = torch.stack([has_nonfinite(tensors[numbers[place]].detach()) for place in floats])
    return Checked(digests, bad, _order(tuple(floats), bad.device))


def _check_rows(tensors: list[torch.Tensor], finite: bool) -> Checked:
    """`tensors` are on one device, in the order of their dtypes."""
    device, sizes = tensors[0].device, tuple(tensor.nbytes for tensor in tensors)
    plan, zeros = _plan(sizes, device), _zeros(device)
    parts = []
    for tensor, padding in zip(tensors, plan.padding, strict=True):
        parts += [tensor.detach().contiguous().view(-1).view(torch.uint8), zeros[:padding]]
    rows = torch.cat(parts).view(torch.int64).view(-1, BLOCK)
    bad, owners = _bad_rows(rows, tensors, plan) if finite else (None, None)
    sums = mix(mix(rows).mul_(weights(1, BLOCK, device))).sum(1)
    again = mix(mix(sums.clone()).mul_(plan.outer))
    digests = plan.sizes.clone().index_add_(0, plan.owners, torch.where(plan.several, again, sums))
    return Checked(digests, bad, owners)


def _bad_rows(
    rows: torch.Tensor, tensors: list[torch.Tensor], plan: _Plan
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return which rows of floats contain NaN or Inf, and the tensors of these rows."""
    found: list[tuple[torch.dtype, int, int]] = []
    owners, start = [], 0
    for tensor, padding in zip(tensors, plan.padding, strict=True):
        count = (tensor.nbytes + padding) // _ZEROS
        if found and found[-1][0] == tensor.dtype:
            found[-1] = (tensor.dtype, found[-1][1], start + count)
        else:
            found.append((tensor.dtype, start, start + count))
        start += count
    flags = []
    for dtype, first, end in found:
        if not dtype.is_floating_point:
            continue
        bits = FLOAT_BITS.get(dtype)
        values = rows[first:end].view(dtype if bits is None else bits.integer)
        wrong = (
            ~torch.isfinite(values).all(1) if bits is None else (values & bits.magnitude_mask).amax(1) >= bits.nonfinite
        )
        flags.append(wrong)
        owners.append(plan.owners[first:end])
    if not flags:
        return None, None
    return torch.cat(flags), torch.cat(owners)


_AT_ONCE = 1 << 24  # numbers that are looked at together, so that a large tensor needs no large intermediate one


def has_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return, as 0-d bool, whether a float tensor contains NaN or Inf. Read as integers, the bits of float magnitudes
    have the order of the magnitudes, so checking the maximum is enough. This is ten times as fast as `isfinite`."""
    bits = FLOAT_BITS.get(tensor.dtype)
    if bits is None:
        return ~torch.isfinite(tensor).all()
    parts = tensor.contiguous().view(bits.integer).view(-1).split(_AT_ONCE)
    return torch.stack([(part & bits.magnitude_mask).amax() for part in parts]).amax() >= bits.nonfinite
