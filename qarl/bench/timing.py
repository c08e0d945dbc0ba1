"""How long single calls take: on a CPU by the clock, on a GPU by replays of CUDA graphs.

A graph of a call holds it `REPEATS` times, and after each a read of more bytes than the L2 cache holds, so that the
operands come from memory as in a model's forward. A second graph holds only the reads. The seconds of a call are the
difference of their replays, divided by `REPEATS`. So they contain no launch by Python, which takes longer than a
product of a few rows. What a call leaves to be written back is written during the read, and counts as its own.

A write instead of the read would leave the cache full of changed lines. The timed call would then wait until they are
written back: on an H200 for 12 to 16 us, as long as a small product takes
(docs/lookup/results/gpu.md#small-figures-of-that-file). `triton.testing.do_bench` evicts by a write, and
`do_bench_cudagraph` not at all.

A call that waits for the device cannot be captured. It is timed by events of its stream, behind such a read, and its
figure has `"timed": "stream"` instead of "graph". Then it contains the launches, as far as they take longer than the
read does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from qarl.bench.report import summary

REPEATS = 5
"""How often a graph holds its call. One pair of events times all of them, whose resolution is half a microsecond."""
CACHES = 4
"""How many times the size of the L2 cache is read to evict it."""
MOST_ROUNDS = 1000

Call = Callable[[], object]
"""A product or quantizer with its operands."""
Timer = Callable[[], float]
"""Runs a call and returns its seconds."""


def measure(
    calls: Mapping[str, Call], device: torch.device, *, seconds: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return median, minimum and maximum of the seconds of every call after a warm-up, the number of rounds (`calls`),
    and how it was timed. A round times each call once. Rounds are repeated until `seconds` have passed, but at least
    `rounds` times."""
    timers = timers_of(calls, GpuClock(device) if device.type == "cuda" else CpuClock())
    taken: dict[str, list[float]] = {name: [] for name in timers}
    start = time.perf_counter()
    done = 0
    while done < rounds or (time.perf_counter() - start < seconds and done < MOST_ROUNDS):
        for name, (_, timer) in timers.items():
            taken[name].append(timer())
        done += 1
    times: dict[str, dict[str, Any]] = {}
    for name, values in taken.items():
        times[name] = summary([values]) | {"calls": len(values), "timed": timers[name][0]}
    return times


def timers_of(
    calls: Mapping[str, Call], clock: CpuClock | GpuClock
) -> dict[str, tuple[str, Timer]]:
    """Warm every call up, and return how it is timed, with its timer."""
    return {name: clock.timer(call) for name, call in calls.items()}


class CpuClock:
    """Times calls by the clock. The caches are as the calls before have left them."""

    def timer(self, call: Call) -> tuple[str, Timer]:
        for _ in range(2):
            call()

        def timed() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return "clock", timed


class GpuClock:
    """Times calls on one GPU. `cuda`: torch.cuda, or what stands for it in a test."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        cache = int(cuda.get_device_properties(device).L2_cache_size)
        self._line = torch.zeros(CACHES * cache // 4, dtype=torch.float32, device=device)
        self._pool = cuda.graph_pool_handle()
        self._evict()  # what PyTorch makes at a first call must not be made in a capture
        self._reads = self._captured(self._evict)

    def timer(self, call: Call) -> tuple[str, Timer]:
        """Warm `call` up, capture it if it can be captured, and return how it is timed, with its timer."""
        call()
        if self._waits(call):
            return "stream", lambda: self._seconds(self._evict, call)

        def call_and_evict() -> None:
            call()
            self._evict()

        try:
            graph = self._captured(call_and_evict)
        except RuntimeError:  # what a capture refuses and PyTorch does not notice before
            return "stream", lambda: self._seconds(self._evict, call)

        def timed() -> float:
            reads = self._seconds(self._reads.replay, self._reads.replay)
            both = self._seconds(self._reads.replay, graph.replay)
            return max(both - reads, 0.0) / REPEATS

        return "graph", timed

    def _waits(self, call: Call) -> bool:
        """Return whether `call` waits for the device, as far as PyTorch notices. A capture would fail, after which
        PyTorch's allocator still believes that one is under way."""
        self._cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            self._cuda.set_sync_debug_mode("default")
        return False

    def _captured(self, call: Call) -> Any:
        """Return a graph that runs `call` `REPEATS` times. What it returns is dropped, so the calls share memory."""
        graph = self._cuda.CUDAGraph()
        stream = self._cuda.current_stream()
        try:
            with self._cuda.graph(graph, pool=self._pool):
                for _ in range(REPEATS):
                    call()
        finally:
            self._cuda.set_stream(stream)  # PyTorch stays on its own stream if a capture fails
        return graph

    def _seconds(self, before: Call, timed: Call) -> float:
        """Return the device's seconds of `timed`. It is launched while the device still runs `before`."""
        start = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        before()
        start.record()
        timed()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _evict(self) -> None:
        """Read more than the L2 cache holds. Nothing is changed, so nothing must be written back later."""
        self._line.sum()
