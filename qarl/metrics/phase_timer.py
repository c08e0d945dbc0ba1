"""The seconds of a training step, by phase.

On a CPU a phase ends when its Python code ends. On a GPU that is too early, because the code only queues kernels, and
to wait for them at each phase would leave the GPU idle while Python queues the next ones. So `CudaClock` puts an event
into the stream at each end of a phase, and the timer reads the events when a step asks for its seconds. Between two
events lies the time in which the device computed what the phase queued, or waited for the phase's Python. Phases that
follow each other share their borders, so they add up to the whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

_NOT_IN_STEP = "eval"
"""As in verl, a step's seconds leave out its evaluation."""


class Clock(Protocol):
    """Marks moments. Only `seconds` may wait for the device."""

    def mark(self) -> Any:
        """Return this moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments."""


class HostClock:
    """The wall clock of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """The moments at which the current stream of the current CUDA device reaches them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    """Return the clock for phases that compute on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Span(NamedTuple):
    """A phase that has ended. `not_in`: the phase around it that leaves it out. `outer`: whether none is around it."""

    name: str
    start: Any
    end: Any
    not_in: str | None
    outer: bool


class PhaseTimer:
    """Measure the seconds of one training step by phase.

    `with timer.phase("rollout"): ...` adds the seconds of the block to that phase, even if the block raises.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock`: by default the wall clock."""
        self._clock = clock or HostClock()
        self._spans: list[Span] = []
        self._depth = 0

    @contextmanager
    def phase(self, name: str, *, not_in: str | None = None) -> Iterator[None]:
        """Time the block. `not_in`: the phase around it, whose seconds leave out those of the block."""
        self._depth += 1
        start = self._clock.mark()
        try:
            yield
        finally:
            end = self._clock.mark()
            self._depth -= 1
            self._spans.append(Span(name, start, end, not_in, outer=not self._depth))

    def pop(self) -> dict[str, float]:
        """Return the seconds since the last `pop()`: `timing_s/<phase>` for each phase, and their sum `timing_s/step`.

        As in verl, the sum leaves out evaluation. A phase inside another phase counts only once in the sum.
        """
        seconds: dict[str, float] = {}
        step = 0.0
        for span in self._spans:
            length = self._clock.seconds(span.start, span.end)
            seconds[span.name] = seconds.get(span.name, 0.0) + length
            if span.not_in is not None:
                seconds[span.not_in] = seconds.get(span.not_in, 0.0) - length
            if span.outer and span.name != _NOT_IN_STEP:
                step += length
        self._spans = []
        return {f"timing_s/{name}": value for name, value in {**seconds, "step": step}.items()}
