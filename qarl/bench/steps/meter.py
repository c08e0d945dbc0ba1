"""Seconds and peak memory of each phase of a training step, by the trainer's own phase timer.

A phase inside another is taken out of it (`exclusive`), so that the phases of a step add up. Peak memory is, on a GPU,
the most that PyTorch's allocator had handed out (`torch.cuda.max_memory_allocated`; vLLM's too, it is in this
process); on a CPU the high-water mark of resident memory, which Linux sets back on request (proc(5), clear_refs). That
is the whole process: weights, optimizer, engine and libraries included. A trainer on a CPU keeps what it frees
(`qarl.process.keep_freed_memory`), so that phases would all show the highest one's: with `Memory.trim` freed memory
goes back first, which is slow, and a step that is measured so is not timed.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qarl.metrics.mismatch import PhaseTimer


class Memory:
    """The high-water mark of this process. `source` says which; "ru_maxrss" cannot be set back: it only grows.
    `trim`: give freed memory back before each reset (glibc alone can)."""

    def __init__(self, device: torch.device) -> None:
        self.trim = False
        self.source = "torch.cuda.max_memory_allocated" if device.type == "cuda" else "peak RSS"
        if device.type != "cuda" and not _reset_resident():
            self.source = "ru_maxrss"

    def reset(self) -> None:
        if self.source == "peak RSS":
            if self.trim:
                _trim()
            _reset_resident()
        elif self.source != "ru_maxrss":
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes, since the last `reset`."""
        if self.source == "peak RSS":
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        if self.source == "ru_maxrss":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.cuda.max_memory_allocated())


def _reset_resident() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _trim() -> None:
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class Meter(PhaseTimer):
    """A phase timer that also keeps what is each phase's own, and its peak memory."""

    def __init__(self, memory: Memory, synchronize: Callable[[], None] | None = None) -> None:
        super().__init__(synchronize)
        self.memory = memory
        self.exclusive: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self._inner: list[float] = []
        self._names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._mark()
        self._names.append(name)
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            with super().phase(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            self.exclusive[name] = self.exclusive.get(name, 0.0) + seconds - self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds
            self._mark()
            self._names.pop()

    def _mark(self) -> None:
        """What the mark has risen to since the last time belongs to every phase that is open."""
        if self._names:
            peak = self.memory.peak()
            for name in self._names:
                self.peaks[name] = max(self.peaks.get(name, 0), peak)
        self.memory.reset()

    def take(self) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
        """Seconds by phase (inner phases included), each phase's own, and peak bytes, since the last call."""
        prefix = "timing_s/"
        inclusive = {name.removeprefix(prefix): seconds for name, seconds in self.pop().items()}
        taken = inclusive, self.exclusive, self.peaks
        self.exclusive, self.peaks = {}, {}
        return taken
