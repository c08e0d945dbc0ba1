"""The statistics of a loss while they are on the device, and one transfer that reads those of many calls.

A number that Python reads makes the host wait until a GPU has computed all that was queued before. So an update keeps
the statistics of its micro-batches as tensors, and reads them together before its optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Unread = dict[Any, Any]
"""The statistics of a call: numbers, or tensors on the device.

    "sum/NAME"                  a number or a scalar tensor; also min/ and max/
    "all/NAME"                  a vector, whose NaNs are left out
    ("sum/NAME", "sum/OTHER")   a vector with a number for each key
    CHECKS                      `Checks`, of which `read` raises what it has found
"""
CHECKS = "checks"


@dataclass(frozen=True)
class Checks:
    """What must not be in the tensors of a call.

    names   what each check looks for
    found   FP64 [1 + 2 * checks]; the number of responses, the positions that each check has found, and the index of
            the first of them in the flattened [B, T]
    width   T
    most    the largest number of responses, or None
    """

    names: tuple[str, ...]
    found: torch.Tensor
    width: int
    most: int | None

    @classmethod
    def of(cls, bad: Mapping[str, torch.Tensor], valid: torch.Tensor, most: int | None) -> Checks:
        """Return the checks that look for true in `bad`, what is wrong -> bool [B, T]. `valid`: bool [B, T]."""
        where = torch.stack([*bad.values()]).flatten(1)
        responses = valid.any(dim=-1).sum()[None]
        found = torch.cat([responses, where.sum(1), where.int().argmax(1)])
        return cls(tuple(bad), found.double(), valid.shape[1], most)

    def refuse(self, numbers: Sequence[float]) -> None:
        """Raise ValueError for the first check that has found something. `numbers`: those of `found`."""
        responses, *found = map(int, numbers)
        counts = found[: len(self.names)]
        firsts = found[len(self.names) :]
        for what, count, first in zip(self.names, counts, firsts, strict=True):
            if count:
                row, position = divmod(first, self.width)
                raise ValueError(
                    f"{what} at row {row}, position {position} ({count} such positions in all)"
                )
        if self.most is not None and responses > self.most:
            raise ValueError(
                f"global_batch_size is {self.most} but this call alone has {responses} responses"
            )


def read(calls: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Return the statistics of several calls as numbers and lists, with one transfer from the device to the CPU.

    Raise ValueError for what the checks of a call have found.
    """
    tensors = [_tensor(value) for call in calls for value in call.values()]
    unread = [tensor.detach().double().reshape(-1) for tensor in tensors if tensor is not None]
    numbers = torch.cat(unread).tolist() if unread else []
    known = []
    start = 0
    for call in calls:
        statistics: dict[str, Any] = {}
        for key, value in call.items():
            tensor = _tensor(value)
            if tensor is None:
                statistics[key] = value
                continue
            end = start + tensor.numel()
            statistics |= _named(key, value, numbers[start:end])
            start = end
        known.append(statistics)
    return known


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, Checks):
        return value.found
    return value if isinstance(value, torch.Tensor) else None


def _named(key: Any, value: Any, numbers: list[float]) -> dict[str, Any]:
    """Return the statistics that an entry of `Unread` stands for. `numbers`: those of its tensor."""
    if isinstance(value, Checks):
        value.refuse(numbers)
        return {}
    if isinstance(key, tuple):
        return dict(zip(key, numbers, strict=True))
    if key.startswith("all/"):
        return {key: [number for number in numbers if not math.isnan(number)]}
    (number,) = numbers
    return {key: number}
