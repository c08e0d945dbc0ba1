"""`EngineRecovery` under sequences of publish failures, with and without rebuild_on_failure."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial

import pytest

from qarl.rollout.engine import EngineFailed
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved
from qarl.rollout.recovery import EngineRecovery

TENSORS: list[tuple[str, object]] = []
FAILURES = {
    "disk": lambda: OSError(5, "input/output error"),
    "reload": lambda: ReloadFailed("lost", why="vLLM failed"),
    "engine": lambda: EngineFailed("gone", why="vLLM failed"),
}


class WithAdapters:
    """Its base is there after a publish, until `rebuild`. The first adapter fails as told."""

    def __init__(self, *failures: str) -> None:
        self.failures = [FAILURES[name]() for name in failures]
        self.calls: list[str] = []
        self.has_weights = False

    def _report(self, call: str, size: int) -> PublishReport:
        self.calls.append(call)
        return PublishReport(7, 1, size, 0, 0, {})

    def publish(self, tensors, *, version):
        assert (tensors, version) == (TENSORS, 7)
        self.has_weights = True
        return self._report("base", 1000)

    def publish_adapter(self, adapter, *, version):
        report = self._report("adapter", 10)
        if self.failures:
            raise self.failures.pop(0)
        return report

    def rebuild(self) -> None:
        self.calls.append("rebuild")
        self.has_weights = False


def test_the_base_is_published_once_and_again_to_a_new_engine():
    engine = WithAdapters("engine")
    recovery = EngineRecovery(engine, rebuild_on_failure=True)
    base = partial(engine.publish, TENSORS, version=7)
    reports = [recovery.publish_adapter(base, object(), version=7) for _ in range(2)]
    assert engine.calls == ["base", "adapter", "rebuild", "base", "adapter", "adapter"]
    assert [report.bytes for report in reports] == [1010, 10]
    assert recovery.rebuilds == 1


class FakeEngine:
    """Fails as told, one failure a publish, then takes everything; counts what is asked of it."""

    def __init__(self, *failures: str) -> None:
        self.failures = [FAILURES[name]() for name in failures]
        self.raised: list[Exception] = []
        self.published: list[tuple[object, int]] = []
        self.rebuilt = 0

    def publish(self, tensors, *, version):
        if self.failures:
            self.raised.append(self.failures.pop(0))
            raise self.raised[-1]
        self.published.append((tensors, version))
        return "report"

    def rebuild(self) -> None:
        self.rebuilt += 1


def publish(recovery: EngineRecovery) -> object:
    return recovery.rebuilding_if_lost(lambda: recovery.engine.publish(TENSORS, version=7))


@pytest.mark.parametrize(
    ("sequence", "rebuild", "error", "rebuilt"),
    [
        ([], False, None, 0),
        (["disk"], True, OSError, 0),
        (["reload"], False, ReloadFailed, 0),
        (["reload"], True, None, 1),
        (["engine"], True, None, 1),
        (["reload", "disk"], True, OSError, 1),
        (["reload", "engine"], True, EngineFailed, 1),
    ],
)
def test_a_lost_engine_is_replaced_once(sequence, rebuild, error, rebuilt, capsys):
    engine = FakeEngine(*sequence)
    recovery = EngineRecovery(engine, rebuild_on_failure=rebuild)
    with nullcontext() if error is None else pytest.raises(error) as raised:
        assert publish(recovery) == "report" and engine.published == [(TENSORS, 7)]
    assert error is None or raised.value is engine.raised[-1]
    assert (
        engine.rebuilt
        == recovery.rebuilds
        == capsys.readouterr().err.count("is restarted")
        == rebuilt
    )


def test_no_engine_is_started_that_would_have_the_same_fault():
    engine = FakeEngine()
    engine.failures = [TensorsMoved("moved", why="the graphs would use memory that was freed")]
    with pytest.raises(TensorsMoved, match=r"fix: set rollout\.enforce_eager=true"):
        publish(EngineRecovery(engine, rebuild_on_failure=True))
    assert engine.rebuilt == 0


def test_the_error_keeps_nothing_of_the_lost_engine_while_another_starts(monkeypatch):
    """The functions that raised an error hold the engine's model in their variables, and it is being handled."""
    engine, models, left = FakeEngine(), [], []

    class Model:
        pass

    def load() -> None:
        model = Model()
        models.append(weakref.ref(model))
        raise RuntimeError("vLLM failed")

    def fail_once(tensors, *, version):
        if models:
            return "report"
        try:
            load()
        except RuntimeError as error:
            raise ReloadFailed("lost", why="vLLM failed") from error

    engine.publish, engine.rebuild = fail_once, lambda: left.append(models[0]())
    assert publish(EngineRecovery(engine, rebuild_on_failure=True)) == "report"
    assert left == [None]
