"""`EngineRecovery` under every short sequence of publish failures, with and without rebuild_on_failure."""

from __future__ import annotations

import itertools
import weakref

import pytest

from qarl.rollout.engine import EngineFailed, EngineRecovery
from qarl.rollout.publish.wire import TransferFailed
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved

TENSORS: list[tuple[str, object]] = []
FAILURES = {
    "transfer": lambda: TransferFailed("damaged"),
    "disk": lambda: OSError(5, "input/output error"),
    "reload": lambda: ReloadFailed("lost", why="vLLM failed"),
    "engine": lambda: EngineFailed("gone", why="vLLM failed"),
}


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
    return recovery.publish(TENSORS, version=7)


def attempts_allowed(sequence: tuple[str, ...], rebuild: bool) -> int:
    """How many of these failures are survived: one resend for each engine, and one other engine if asked for."""
    resends = rebuilds = 1
    for survived, kind in enumerate(sequence):
        if kind in ("transfer", "disk"):
            if not resends:
                return survived
            resends -= 1
        else:
            if not (rebuild and rebuilds):
                return survived
            resends, rebuilds = 1, 0
    return len(sequence)


SEQUENCES = [sequence for length in (0, 1, 2, 3) for sequence in itertools.product(FAILURES, repeat=length)]


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("sequence", SEQUENCES, ids="-".join)
def test_every_sequence_of_failures(sequence, rebuild, capsys):
    engine = FakeEngine(*sequence)
    recovery = EngineRecovery(engine, rebuild_on_failure=rebuild)
    survived = attempts_allowed(sequence, rebuild)
    if survived == len(sequence):
        assert publish(recovery) == "report"
        assert engine.published == [(TENSORS, 7)]
    else:
        with pytest.raises(type(FAILURES[sequence[survived]]())) as error:
            publish(recovery)
        assert error.value is engine.raised[-1] and len(engine.raised) == survived + 1
        assert engine.published == []
    assert engine.rebuilt == recovery.rebuilds == sum(kind in ("reload", "engine") for kind in sequence[:survived])
    assert capsys.readouterr().err.count("is restarted") == engine.rebuilt


@pytest.mark.parametrize(
    ("sequence", "rebuild", "survived", "rebuilt"),
    [
        (["transfer", "reload"], True, True, 1),  # a handler that publishes again lets the second one out
        (["disk", "engine"], True, True, 1),
        (["transfer", "reload"], False, False, 0),
        (["transfer", "reload", "transfer"], True, True, 1),
        (["reload", "reload"], True, False, 1),
        (["transfer", "disk"], True, False, 0),
    ],
)
def test_sequences_by_hand(sequence, rebuild, survived, rebuilt):
    engine = FakeEngine(*sequence)
    recovery = EngineRecovery(engine, rebuild_on_failure=rebuild)
    if survived:
        publish(recovery)
    else:
        with pytest.raises((TransferFailed, ReloadFailed, OSError)):
            publish(recovery)
    assert engine.rebuilt == rebuilt


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
