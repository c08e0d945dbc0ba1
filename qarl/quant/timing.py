"""Time the phases of quantization: `quantize` (scales and codes), `pack` (codes into int32), `prepare` (kernel layout).

    with measure_phases() as seconds:
        policy.requantize()
    seconds["pack"]

Outside of such a block a phase costs only a look-up. On a GPU only the time to queue the kernels is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("qarl_quant_phases", default=None)


@contextmanager
def measure_phases() -> Iterator[dict[str, float]]:
    """Collect the seconds of every phase in the block. Phases in an inner `measure_phases` count only there."""
    seconds = {"quantize": 0.0, "pack": 0.0, "prepare": 0.0}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time of the block as phase `name`."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start
