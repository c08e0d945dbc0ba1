"""Seconds of the parts of quantization, for whoever asks: `quantize` (scales and codes), `pack` (codes into int32) and
`prepare` (the layout of the trainer's own kernel).

    with measure_phases() as seconds:
        policy.requantize()
    seconds["pack"]

Outside of such a block a phase costs a look-up. On a GPU the times are only those of queueing the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("qarl_quant_phases", default=None)


@contextmanager
def measure_phases() -> Iterator[dict[str, float]]:
    """Collects the seconds of every phase that runs inside, also if it raises; blocks do not see each other's."""
    seconds = {"quantize": 0.0, "pack": 0.0, "prepare": 0.0}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The block is part of phase `name`."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - start
