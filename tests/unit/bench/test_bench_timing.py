"""How `qarl.bench` times a call on a GPU, on a recorded fake of torch.cuda whose device has a clock and a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qarl.bench import timing
from qarl.bench.timing import CpuClock, GpuClock, measure, timers_of

CACHE = 4096
"""Bytes of the fake's L2 cache."""
BYTES_PER_US = 1000.0
LAUNCH = 40.0
"""Microseconds that Python takes for a launch. A replay is one launch."""
CPU = torch.device("cpu")


class Kernel(SimpleNamespace):
    """What a launch does to the device: it takes `us`, reads `read` bytes through the cache, and changes `written`."""

    def __init__(self, us: float = 0.0, read: float = 0.0, written: float = 0.0) -> None:
        super().__init__(us=us, read=read, written=written)


class FakeCuda:
    """The functions of torch.cuda that a GpuClock calls. PyTorch's operators on tensors of a cache or more are kernels
    that read them, or change them if their names end in an underscore."""

    def __init__(self) -> None:
        self.host = 0.0
        """The clock of the host, in microseconds."""
        self.device = 0.0
        """When the device will have finished what was launched."""
        self.dirty = 0.0
        """Bytes of changed lines in the cache."""
        self.capturing: list[Kernel] | None = None
        self.sync_mode = "default"
        self.stream = "main"
        self.launched: list[str] = []

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(L2_cache_size=CACHE)

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_mode = mode

    def launch(self, kernel: Kernel) -> None:
        if self.capturing is not None:
            self.capturing.append(kernel)
            return
        self.host += LAUNCH
        self.launched.append("kernel")
        self.device = max(self.device, self.host)
        self._run(kernel)

    def _run(self, kernel: Kernel) -> None:
        moved = kernel.read + kernel.written
        written_back = min(self.dirty, moved) if moved >= CACHE else 0.0
        self.device += kernel.us + (moved + written_back) / BYTES_PER_US
        self.dirty = min(self.dirty - written_back + kernel.written, CACHE)

    def wait(self) -> None:
        """What `.item()` does."""
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            raise AssertionError("a capture must not be tried")
        self.host = max(self.host, self.device)

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return _Event(self)

    def CUDAGraph(self) -> Any:
        return _Graph(self)

    @contextmanager
    def graph(self, graph: Any, *, pool: str) -> Iterator[None]:
        assert pool == "pool" and self.sync_mode == "default"
        self.capturing = graph.kernels
        self.stream = "side"
        with _Recorded(self):
            yield
        self.capturing = None
        self.stream = "main"


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.at = max(self.cuda.device, self.cuda.host)

    def synchronize(self) -> None:
        self.cuda.host = max(self.cuda.host, self.cuda.device)

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) / 1e3


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.kernels: list[Kernel] = []

    def replay(self) -> None:
        self.cuda.host += LAUNCH
        self.cuda.launched.append("replay")
        self.cuda.device = max(self.cuda.device, self.cuda.host)
        for kernel in self.kernels:
            self.cuda._run(kernel)


class _Recorded(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [a.nbytes for a in args if isinstance(a, torch.Tensor) and a.nbytes >= CACHE]
        changes = func.overloadpacket.__name__.endswith("_")
        for size in sizes:
            self.cuda.launch(Kernel(written=size) if changes else Kernel(read=size))
        return func(*args, **(kwargs or {}))


def seconds_of(cuda: FakeCuda, call: Callable[[], object]) -> tuple[str, float]:
    with _Recorded(cuda):
        ((how, timer),) = timers_of({"call": call}, GpuClock(CPU, cuda)).values()
        timer()
        return how, timer()


def test_a_small_product_takes_what_the_device_takes() -> None:
    """Three microseconds and the read of 7,000 bytes, whatever Python takes to launch it."""
    cuda = FakeCuda()
    how, seconds = seconds_of(cuda, lambda: cuda.launch(Kernel(us=3.0, read=7000)))
    assert (how, seconds) == ("graph", pytest.approx(10e-6))


def test_what_a_call_writes_is_written_back_in_its_own_time() -> None:
    """2,000 bytes of output: 2 us to change them, and 2 us to write them back during the read that follows."""
    cuda = FakeCuda()
    _, seconds = seconds_of(cuda, lambda: cuda.launch(Kernel(us=3.0, written=2000)))
    assert seconds == pytest.approx(7e-6)


def test_the_eviction_reads_more_than_the_cache_and_changes_nothing() -> None:
    """By events, for a call that waits, a write would cost it the time of its lines."""
    cuda = FakeCuda()
    clock = GpuClock(CPU, cuda)
    with _Recorded(cuda):
        clock._evict()
    assert cuda.dirty == 0 and cuda.device - cuda.host >= CACHE / BYTES_PER_US


def test_a_call_that_waits_is_timed_by_events_and_not_captured() -> None:
    cuda = FakeCuda()

    def waits() -> None:
        cuda.launch(Kernel(us=3.0))
        cuda.wait()

    how, seconds = seconds_of(cuda, waits)
    assert how == "stream" and seconds >= 3e-6 and cuda.sync_mode == "default"


def test_a_capture_that_fails_anyway_costs_the_call_only_its_graph() -> None:
    cuda = FakeCuda()

    def refused() -> None:
        if cuda.capturing is not None:
            cuda.capturing = None
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.launch(Kernel(us=3.0))

    assert seconds_of(cuda, refused)[0] == "stream" and cuda.stream == "main"


def test_between_two_events_only_graphs_are_launched() -> None:
    """After the warm-up no kernel is launched by Python, so its time cannot be measured."""
    cuda = FakeCuda()
    with _Recorded(cuda):
        clock = GpuClock(CPU, cuda)
        _, timer = clock.timer(lambda: cuda.launch(Kernel(us=3.0)))
        cuda.launched.clear()
        timer()
    assert set(cuda.launched) == {"replay"}


def test_rounds_take_turns_and_figures_say_how_they_were_timed() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure(calls, CPU, seconds=0.0, rounds=3)  # type: ignore[arg-type]  # the name is bound early
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert times["a"]["calls"] == 3 and times["a"]["timed"] == "clock"
    assert times["b"]["minimum"] <= times["b"]["median"] <= times["b"]["maximum"]


def test_a_cpu_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(moments))
    _, timer = CpuClock().timer(lambda: None)
    assert timer() == 2.5
