"""A GPU that vLLM and the trainer share, without a GPU: what is refused, with which numbers and reasons."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.checks.machine import Machine
from qarl.checks.registry import CHECKS
from qarl.errors import UserError
from qarl.rollout.engine import EngineConfig, EngineFailed, RolloutEngine, SamplingConfig
from qarl.rollout.engine_config import capture_sizes, check_free_memory, llm_arguments
from qarl.rollout.kernel_request import LEAST_ROWS_KEY
from qarl.rollout.recovery import RecoveringEngine
from qarl.schemes import get_scheme
from qarl.schemes.kernel_choice import KernelChoice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("value", "backend", "on_gpu", "refused"),
    [
        ("1", "local", True, True),
        ("1", "verl", True, False),  # its engines have processes of their own
        ("1", "local", False, False),
        ("0", "local", True, False),
    ],
)
def test_batch_invariance_is_refused_in_the_trainers_process(
    value: str, backend: str, on_gpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check of a run, and by an engine in a program of one's own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    check = next(check for check in CHECKS if check.name == "vLLM replaces no operator")
    run: Any = SimpleNamespace(
        config=SimpleNamespace(backend=backend), machine=Machine("cuda", "", here=True)
    )
    message = r"(?s)trainer's process.*torch\.bmm.*gradients.*unset VLLM_BATCH_INVARIANT"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        if check.applies(run):
            list(check.findings(run))
    if refused:
        with pytest.raises(UserError, match=message):
            RolloutEngine(config())


GIB = 2**30


def config(**more: Any) -> EngineConfig:
    return EngineConfig("model", more.pop("scheme", get_scheme("w4a16")), ("lm_head",), 64, **more)


@pytest.fixture
def memory(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(free: float, total: float, allocated: float) -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), int(total * GIB)))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(allocated * GIB))

    return of


def test_an_engine_is_not_started_without_room(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before vLLM, in the first start and in a rebuild. The refusal names a share that is free."""
    memory(free=30.7, total=80, allocated=47)
    check_free_memory(0.38)
    monkeypatch.setitem(
        sys.modules,
        "vllm",
        SimpleNamespace(LLM=lambda **arguments: pytest.fail("vLLM was started")),
    )
    engine = object.__new__(RolloutEngine)
    engine.config = config(gpu_memory_utilization=0.5)
    message = r"(?s)40\.0 GiB.*30\.7 GiB are free.*holds 47\.0 GiB of 80\.0.*utilization=0\.38"
    with pytest.raises(UserError, match=message):
        engine._start()


class SleepingLLM:
    """In the place of vLLM: while it sleeps, its memory is gone. `idle`: whether no request is running."""

    idle = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache = torch.zeros(4)
        self.llm_engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake")
        self.cache.fill_(float("nan"))  # as memory that another tensor had

    def reset_prefix_cache(self) -> bool:
        return self.idle


class Receiver:
    version, broken, cache, stale_because, kv_cache_spoilt = 1, False, None, "", False

    def __init__(self, llm: SleepingLLM) -> None:
        self.kv_caches, self.seconds = lambda: [llm.cache], {}
        self.llm = llm

    @contextmanager
    def replacing(self, version: int) -> Iterator[Any]:
        yield SimpleNamespace(
            write_units=lambda tensors, prepared: self.llm.calls.append("publish")
        )

    def mark_stale(self, reason: str) -> None:
        self.version, self.stale_because = None, reason


@pytest.fixture
def engine(gpu: None) -> Any:
    instance: Any = object.__new__(RolloutEngine)
    instance.config, instance._asleep, instance._dynamo_was_disabled = config(), False, None
    instance.adapter, instance._counts_preemptions = None, True
    instance.llm, instance.expected = SleepingLLM(), {}
    instance.weights = Receiver(instance.llm)
    return instance


def test_the_engine_sleeps_once_and_wakes_with_an_empty_cache(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and if the key does not say otherwise."""
    engine.wake_up()
    engine.sleep()
    engine.sleep()
    engine.wake_up()
    assert engine.llm.cache.tolist() == [0] * 4
    engine.config = config(free_cache_engine=False)
    engine.sleep()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine.config = config()
    engine.sleep()
    assert engine.llm.calls == ["sleep 1", "wake"]


@pytest.mark.parametrize("ending", ["wake_up", "close"])
def test_pytorchs_unused_memory_is_free_before_vllm_wakes(
    ending: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the memory of tensors that only a cycle of references keeps."""
    calls = engine.llm.calls
    engine.llm.llm_engine = SimpleNamespace(
        engine_core=SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    )
    engine.sleep()
    monkeypatch.setattr(
        torch.cuda,
        "empty_cache",
        lambda: calls.append("empty" if garbage() is None else "too early"),
    )
    tensor: Any = torch.zeros(4)
    tensor.itself, garbage = tensor, weakref.ref(tensor)
    gc.disable()
    try:
        del tensor
        getattr(engine, ending)()
    finally:
        gc.enable()
    assert calls[:3] == ["sleep 1", "empty", "wake"]


def test_a_publish_and_a_rollout_wake_it_first(engine: Any) -> None:
    engine.sleep()
    engine.publish([], version=2)
    engine.llm.generate = lambda *arguments, **more: engine.llm.calls.append("generate") or []
    engine.llm.get_metrics = list
    engine.sleep()
    engine.generate([], SamplingConfig(4))
    assert engine.llm.calls == ["sleep 1", "wake", "publish", "sleep 1", "wake", "generate"]


def test_a_publish_resets_the_prefix_cache(engine: Any) -> None:
    engine.publish([], version=2)
    engine.llm.idle = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.publish([], version=3)
    assert engine.stale and "version 3 did not complete" in engine.weights.stale_because


def test_an_engine_that_cannot_wake_is_lost_and_says_why(engine: Any) -> None:
    def no_room() -> None:
        raise RuntimeError("CUDA out of memory")

    engine.sleep()
    engine.llm.wake_up = no_room
    with pytest.raises(EngineFailed, match="CUDA out of memory"):
        engine.publish([], version=2)
    assert engine.weights.broken and engine.stale
    engine.sleep()  # a broken engine is left alone
    assert engine.llm.calls == ["sleep 1"]


def test_an_engine_that_falls_asleep_half_way_is_lost_and_is_woken_before_it_is_closed(
    engine: Any,
) -> None:
    """vLLM would free memory that is already unmapped."""

    def half_way(level: int) -> None:
        raise RuntimeError("no host memory")

    calls = engine.llm.calls
    engine.llm.sleep = half_way
    engine.llm.llm_engine = SimpleNamespace(
        engine_core=SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    )
    with pytest.raises(EngineFailed, match="no host memory"):
        engine.sleep()
    assert engine.weights.broken and engine.stale
    engine.close()
    assert calls == ["wake", "shutdown"]


def test_a_failed_sleep_is_no_error_if_the_engine_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(engine: RolloutEngine) -> None:
        raise EngineFailed("the rollout engine is lost", why="no host memory")

    monkeypatch.setattr(RolloutEngine, "sleep", fail)
    object.__new__(RecoveringEngine).sleep()
    assert "no host memory" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_closed_engine_frees_the_memory_pools_of_sleep_mode(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own object, with pools that say when they go: before their allocators, which they call."""
    from vllm.device_allocator.cumem import CuMemAllocator

    calls = engine.llm.calls

    class Freed:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            calls.append(self.name)

    allocator: Any = CuMemAllocator()
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    for tag in ("weights", "kv_cache"):
        allocator.allocator_and_pools[tag] = Freed("pool"), Freed("allocator")
    engine.llm.llm_engine = SimpleNamespace(
        engine_core=SimpleNamespace(shutdown=lambda: calls.append("shutdown"))
    )
    engine.close()
    assert calls == ["shutdown", "pool", "pool", "empty", "allocator", "allocator"]


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("kernels", [KernelChoice.ENGINE, KernelChoice.QARL])
@pytest.mark.parametrize(("asked", "graphs"), [(None, True), (False, True), (True, False)])
def test_what_is_captured_and_compiled_on_a_gpu(
    scheme: str, aligned: bool, kernels: str, asked: bool | None, graphs: bool, gpu: None
) -> None:
    """Nothing is compiled where the trainer follows the engine's operators, or their 8-bit activations."""
    settings = config(
        enforce_eager=asked, scheme=get_scheme(scheme, 32), aligned=aligned, kernels=kernels
    )
    arguments = llm_arguments(settings)
    assert arguments["enforce_eager"] is not graphs and arguments["enable_sleep_mode"] is True
    vllms_default = not aligned and scheme in ("bf16", "w4a16") and kernels.by_engine
    wanted = (
        {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if graphs and not vllms_default else None
    )
    padded = aligned and scheme == "fp8" and kernels.by_engine
    if wanted is not None and padded:
        wanted |= {"cudagraph_capture_sizes": [*range(72, 256, 8), 256]}
    assert arguments.get("compilation_config") == wanted
    rows = arguments.get("additional_config", {}).get(LEAST_ROWS_KEY)
    assert rows == (65 if padded else None)
    assert (
        not {"enable_prefix_caching", "enable_chunked_prefill"} & arguments.keys()
    )  # vLLM's defaults, both on


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        (64, None),
        (65, [65]),
        (72, [72]),
        (100, [72, 80, 88, 96, 100]),
        (300, [*range(72, 256, 8), 256, 272, 288, 300]),
    ],
)
def test_graphs_begin_at_the_least_rows(requests: int, sizes: list[int] | None) -> None:
    assert capture_sizes(65, requests).get("cudagraph_capture_sizes") == sizes


def test_on_a_cpu_the_default_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = llm_arguments(config())
    assert arguments["enforce_eager"] is True
    assert arguments["enable_prefix_caching"] is arguments["enable_chunked_prefill"] is False
    assert "compilation_config" not in arguments and "enable_sleep_mode" not in arguments
    assert llm_arguments(config(enforce_eager=False))["enforce_eager"] is False
