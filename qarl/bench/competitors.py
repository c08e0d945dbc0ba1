"""What `qarl bench kernels` compares: calls that do the same work, each with the error of its result.

A time is reported only if the first and last rows of the result agree with float64, by relative error (root mean
square). The tests check everything else about a kernel's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

CHECKED_ROWS = 64
"""Number of rows that are compared at each end of a result."""
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Competitor:
    """One implementation of an operation. `call` is timed. `error` returns the error of its result.

    `allowed`: the largest allowed error. `bytes_moved` and `flop`: the minimum for the operation, the same for every
    implementation."""

    scheme: str
    kernel: str
    call: Callable[[], object]
    error: Callable[[], float]
    allowed: float
    bytes_moved: int
    flop: int = 0

    @property
    def name(self) -> str:
        return f"{self.scheme} {self.kernel}"

    def wrong(self) -> str | None:
        """Return why this call is not timed (error too large, or an exception), or None if it is."""
        try:
            error = self.error()
        except (
            Exception
        ) as raised:  # it does not compile or launch; the others must still be measured
            return f"{type(raised).__name__}: {raised}"
        if error <= self.allowed:
            return None
        return f"its relative error is {error:.2e}; {self.allowed:.0e} is allowed"


def ends(rows: torch.Tensor) -> torch.Tensor:
    """Return the first and last `CHECKED_ROWS` rows."""
    if len(rows) <= 2 * CHECKED_ROWS:
        return rows
    return torch.cat([rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]])


def error_of(call: Call, expected: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs `call` and returns the relative error of the first and last rows of its result.
    The error is NaN if any number in the result is not finite. `expected`: the correct first and last rows."""

    def error() -> float:
        y = call()
        return relative(ends(y), expected) if bool(y.isfinite().all()) else float("nan")

    return error


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def random_rows(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    """Return random BF16 [rows, cols]. The same shape always gives the same numbers."""
    generator = torch.Generator(like.device).manual_seed(rows * 31 + cols)
    return torch.randn(rows, cols, generator=generator, device=like.device).bfloat16()


class Group(NamedTuple):
    """Competitors for the same work, which `keys` describes."""

    keys: dict[str, Any]
    competitors: list[Competitor]

    @property
    def label(self) -> str:
        keys = self.keys
        rows = f" m={keys['m']}" if keys["m"] else ""
        return f"{keys['model']} {keys['layer']} {keys['n']}x{keys['k']} {keys['operation']}{rows}"


def exact(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what 8-bit numbers and their scales represent, in float64."""
    return values.double() * scale.double()
