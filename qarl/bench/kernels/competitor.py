"""A call that is timed, and the one check that its numbers must pass to get a figure.

The check is plain: the relative error (root mean square) of the first and last rows of its result against float64.
Everything else about a kernel's numbers is the test suite's to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CHECKED_ROWS = 64
"""Rows at each end of a result that are compared."""
PRODUCT_ERROR, FP8_ERROR = 3e-3, 1e-2
"""Relative error allowed to a product: BF16 rounding alone is 1.7e-3; FP8 tensor cores sum in fewer than 24 bits."""
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Competitor:
    """`call` is timed; `error` says how far its result is off, and `allowed` how far it may be; `bytes_moved` and
    `flop` are what the operation needs, whoever does it."""

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
        """Why it gets no figure: its error, or what it raised."""
        try:
            error = self.error()
        except (RuntimeError, ValueError, TypeError) as raised:  # a kernel that does not compile or launch
            return f"{type(raised).__name__}: {raised}"
        return None if error <= self.allowed else f"its result is off by {error:.2e}, {self.allowed:.0e} is allowed"


def ends(rows: torch.Tensor) -> torch.Tensor:
    """The first and last rows."""
    return rows if len(rows) <= 2 * CHECKED_ROWS else torch.cat([rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]])


def error_of(call: Call, expected: torch.Tensor) -> Callable[[], float]:
    """The relative error of the ends of `call()` against `expected`; NaN if anything in it is not finite."""

    def error() -> float:
        y = call()
        return relative(ends(y), expected) if bool(y.isfinite().all()) else float("nan")

    return error


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def random_rows(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    """BF16 [rows, cols], the same for everybody who asks."""
    generator = torch.Generator(like.device).manual_seed(rows * 31 + cols)
    return torch.randn(rows, cols, generator=generator, device=like.device).bfloat16()
