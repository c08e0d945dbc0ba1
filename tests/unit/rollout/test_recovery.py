"""`RecoveringEngine` under sequences of publish failures, with and without rebuild_on_failure."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
from torch import nn

from qarl.rollout.engine import EngineFailed, RolloutEngine
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved
from qarl.rollout.recovery import RecoveringEngine
from qarl.trainer.policy import Policy

TENSORS: list[tuple[str, object]] = []
FAILURES = {
    "disk": lambda: OSError(5, "input/output error"),
    "reload": lambda: ReloadFailed("lost", why="vLLM failed"),
    "engine": lambda: EngineFailed("gone", why="vLLM failed"),
}


class FakeEngine(RecoveringEngine):
    """Fails as told, one failure a publish, then takes everything; counts what is asked of it."""

    has_weights = False

    def __init__(self, *failures: str) -> None:
        self.failures = [FAILURES[name]() for name in failures]
        self.raised: list[Exception] = []
        self.published: list[tuple[object, int]] = []
        self.calls: list[str] = []

    def publish(self, tensors, *, version, prepared=None):
        self.calls.append("base")
        if self.failures:
            self.raised.append(self.failures.pop(0))
            raise self.raised[-1]
        self.published.append((tensors, version))
        self.has_weights = True
        return REPORT

    def rebuild(self) -> None:
        self.calls.append("rebuild")
        self.has_weights = False


REPORT = PublishReport(7, 1, 1000, 0, 0, {"apply": 2.0})


class WithAdapters(FakeEngine):
    """The first adapter fails as told, after its base was published."""

    def publish(self, tensors, *, version, prepared=None):
        failures, self.failures = self.failures, []
        report = super().publish(tensors, version=version)
        self.failures = failures
        return report

    def publish_adapter(self, adapter, *, version):
        self.calls.append("adapter")
        if self.failures:
            raise self.failures.pop(0)
        return PublishReport(7, 1, 10, 0, 0, {"apply": 1.0, "validate": 3.0})


def policy(*, adapters: bool) -> Policy:
    """A policy without a model."""
    policy = object.__new__(Policy)
    policy.model = nn.Module()
    policy.published_tensors = lambda: TENSORS
    policy.adapters = (
        SimpleNamespace(adapter=object, share=lambda storage: None) if adapters else None
    )
    return policy


def test_the_base_is_published_once_and_again_to_a_new_engine():
    engine = WithAdapters("engine")
    engine.weights = SimpleNamespace(storage=dict)
    reports = [engine.publish_from(policy(adapters=True).publish, version=7) for _ in range(2)]
    assert engine.calls == ["base", "adapter", "rebuild", "base", "adapter", "adapter"]
    assert [report.bytes for report in reports] == [1010, 10]
    assert reports[0].seconds == {"apply": 3.0, "validate": 3.0}
    assert engine.rebuilds == 1


def publish(engine: RolloutEngine) -> object:
    return engine.publish_from(policy(adapters=False).publish, version=7)


@pytest.mark.parametrize(
    ("sequence", "error", "rebuilt"),
    [
        ([], None, 0),
        (["disk"], OSError, 0),
        (["reload"], None, 1),
        (["engine"], None, 1),
        (["reload", "disk"], OSError, 1),
        (["reload", "engine"], EngineFailed, 1),
    ],
)
def test_a_lost_engine_is_replaced_once(sequence, error, rebuilt, capsys):
    engine = FakeEngine(*sequence)
    with nullcontext() if error is None else pytest.raises(error) as raised:
        assert publish(engine) is REPORT and engine.published == [(TENSORS, 7)]
    assert error is None or raised.value is engine.raised[-1]
    assert (
        engine.calls.count("rebuild")
        == engine.rebuilds
        == capsys.readouterr().err.count("is restarted")
        == rebuilt
    )


def test_no_engine_is_started_that_would_have_the_same_fault():
    engine = FakeEngine()
    engine.failures = [TensorsMoved("moved", why="the graphs would use memory that was freed")]
    with pytest.raises(TensorsMoved, match=r"fix: set rollout\.enforce_eager=true"):
        publish(engine)
    assert engine.calls == ["base"]


def test_the_error_keeps_nothing_of_the_lost_engine_while_another_starts(monkeypatch):
    """The functions that raised an error hold the engine's model in their variables, and it is being handled."""
    engine, models, left = FakeEngine(), [], []

    class Model:
        pass

    def load() -> None:
        model = Model()
        models.append(weakref.ref(model))
        raise RuntimeError("vLLM failed")

    def fail_once(tensors, *, version, prepared):
        if models:
            return REPORT
        try:
            load()
        except RuntimeError as error:
            raise ReloadFailed("lost", why="vLLM failed") from error

    engine.publish, engine.rebuild = fail_once, lambda: left.append(models[0]())
    assert publish(engine) is REPORT
    assert left == [None]


def test_a_new_engine_samples_from_the_weights_of_the_last_publish(monkeypatch):
    engine = FakeEngine()
    with pytest.raises(EngineFailed):  # nothing was published
        monkeypatch.setattr(RolloutEngine, "generate", fails_until(3))
        engine._last_publish = None
        engine.generate([[1]], SamplingConfig(1))
    publish(engine)
    monkeypatch.setattr(RolloutEngine, "generate", fails_until(1))
    assert engine.generate([[1]], SamplingConfig(1)) == "responses"
    assert engine.calls == ["rebuild", "base", "rebuild", "base"]
    assert [version for _, version in engine.published] == [7, 7]


def fails_until(successful: int) -> Callable[..., object]:
    """`generate` of an engine that fails this many times."""
    calls = count()

    def generate(*arguments: object, **options: object) -> object:
        if next(calls) < successful:
            raise FAILURES["engine"]()
        return "responses"

    return generate
