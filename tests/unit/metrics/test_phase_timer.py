"""The seconds of a step's phases, by the wall clock and by events in a stream."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from qarl.metrics.phase_timer import CudaClock, HostClock, PhaseTimer, clock_of


def test_phases_accumulate_and_start_anew() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(RuntimeError), timer.phase("update"):
        raise RuntimeError
    with timer.phase("update"), timer.phase("old_log_prob", not_in="update"):
        time.sleep(0.01)
    seconds = timer.pop()
    assert set(seconds) == {
        f"timing_s/{name}" for name in ("rollout", "update", "old_log_prob", "step")
    }
    assert 0.02 <= seconds["timing_s/rollout"] < 5
    assert seconds["timing_s/update"] < 0.01 <= seconds["timing_s/old_log_prob"]
    assert seconds["timing_s/step"] == pytest.approx(sum(seconds.values()) / 2)
    assert timer.pop() == {"timing_s/step": 0.0}


class Stream:
    """A device that the host runs ahead of. `queued`: seconds of work that the host has queued so far."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.waits = 0

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """What torch.cuda.Event offers of it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.reached = 0.0
        self._known = False

    def record(self) -> None:
        self.reached = self._stream.queued

    def synchronize(self) -> None:
        self._stream.waits += 1
        self._known = True

    def elapsed_time(self, end: Event) -> float:
        assert end._known, "an event is read before the host has waited for it"
        return 1000 * (end.reached - self.reached)


def test_on_a_gpu_the_host_waits_only_when_seconds_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward of 2 s and a backward of 3 s, twice, and an optimizer's step of 1 s within the update."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    timer = PhaseTimer(clock_of(torch.device("cuda")))
    with timer.phase("update"):
        for _ in range(2):
            for name, seconds in (("forward", 2.0), ("backward", 3.0)):
                with timer.phase(name):
                    stream.queued += seconds
        stream.queued += 1.0
    assert stream.waits == 0
    expected = {"forward": 4, "backward": 6, "update": 11, "step": 11}
    assert timer.pop() == {f"timing_s/{name}": value for name, value in expected.items()}


def test_the_clock_is_that_of_the_device() -> None:
    for name in ("record", "synchronize", "elapsed_time"):
        assert hasattr(torch.cuda.streams.Event, name)
    kinds: dict[str, Any] = {"cpu": HostClock, "cuda": CudaClock, "cuda:1": CudaClock}
    for device, kind in kinds.items():
        assert type(clock_of(torch.device(device))) is kind
