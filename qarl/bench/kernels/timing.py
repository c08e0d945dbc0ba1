"""Time competing calls. They take turns, call by call, so that a change in the machine's speed affects all equally.

On a GPU each call is timed by events of its stream. Before each call, a write removes its operands from the L2 cache,
because in a model's forward they would not be there. On a CPU calls are timed by the clock, and the caches are as the
other calls left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

FLUSH_BYTES, MOST_ROUNDS = 512 * 2**20, 1000


@dataclass(frozen=True)
class Times:
    """Seconds of one call, from a sample of `calls` calls."""

    median: float
    minimum: float
    maximum: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def measure(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float, rounds: int
) -> dict[str, Times]:
    """Return the times of every call after a warm-up. A round runs each call once.
    Rounds are repeated until `seconds` have passed, but at least `rounds` times."""
    for call in calls.values():
        for _ in range(2):
            call()
    one = _seconds_on_gpu if device.type == "cuda" else _seconds_on_cpu
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start, done = time.perf_counter(), 0
    while done < rounds or (time.perf_counter() - start < seconds and done < MOST_ROUNDS):
        for name, call in calls.items():
            taken[name].append(one(call))
        done += 1
    return {name: Times.of(values) for name, values in taken.items()}


def _seconds_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _seconds_on_gpu(call: Callable[[], object]) -> float:
    _flush_buffer().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure the machine's peak rates: bytes/s of a copy (reads plus writes), and FLOP/s of a large BF16 product."""
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
    times = measure(calls, device, seconds=1.0 if on_gpu else 0.5, rounds=10)
    return {
        "copy_bytes_per_s": 2 * size / times["copy"].median,
        "bf16_flop_per_s": 2 * side**3 / times["product"].median,
    }
