"""verl's checkpoint-engine interface: between two processes, without Ray, and by verl's own manager."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from publish_streams import weights
from ranks import RAYS, run_ranks

from qarl.rollout.remote.records import COMMIT
from qarl.rollout.remote.sockets import PeerLost
from qarl.rollout.remote.wire import DeltaSender

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("ray")


from qarl.rollout.remote import host_turn
from qarl.verl.config_classes import QuantSettings
from qarl.verl.fsdp_engine import QaRLFSDPEngine
from qarl.verl.publication import TIMEOUT_VARIABLE, publication
from qarl.verl.publish import QaRLCheckpointEngine

LATE = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def rays_variables(monkeypatch):
    for name, value in (RAYS | {TIMEOUT_VARIABLE: "60"}).items():
        monkeypatch.setenv(name, value)


class InThreads:
    """The actor's first rank and rollout workers, which are threads here. `take`: what a vLLM worker does."""

    def __init__(self, workers: int) -> None:
        self.master = QaRLCheckpointEngine(is_master=True, host="127.0.0.1")
        self.workers = [QaRLCheckpointEngine() for _ in range(workers)]
        self.taken: list[list[str]] = []

    def publish(self, stream: Any, take: Any = lambda worker, name: None) -> tuple[Any, list[Any]]:
        """As verl's manager: it calls `finalize` only if there was no error. Returns the errors of both sides."""
        metadata = [engine.prepare() for engine in (self.master, *self.workers)]
        actor, rollout = QaRLCheckpointEngine.build_topology(1, len(self.workers), metadata)
        self.master.init_process_group(**{key: value[0] for key, value in actor.items()})
        errors: list[Any] = [None] * len(self.workers)
        self.taken = [[] for _ in self.workers]

        def receive(number: int) -> None:
            engine = self.workers[number]
            engine.init_process_group(**{key: value[number] for key, value in rollout.items()})
            try:
                for name, _ in engine._received():
                    take(number, name)
                    self.taken[number].append(name.partition("#")[0])
            except BaseException as error:
                errors[number] = error

        threads = [
            threading.Thread(target=receive, args=(number,)) for number in range(len(self.workers))
        ]
        for thread in threads:
            thread.start()
        error = None
        try:
            asyncio.run(self.master.send_weights(stream))
        except BaseException as caught:
            error = caught
        for thread in threads:
            thread.join(30)
        if error is None and errors == [None] * len(self.workers):
            for engine in (self.master, *self.workers):
                engine.finalize()
        return error, errors


def test_workers_say_what_they_hold_only_after_a_publish_that_was_complete_for_all():
    """If one worker fails, no vLLM worker gets the last record, and the next publish sends all tensors."""
    both, outbox, tensors = InThreads(2), DeltaSender(), weights("llama")

    def fail(worker: int, name: str) -> None:
        if worker == 1 and name == LATE:
            raise OSError("no memory")

    for version, known in enumerate([False, True, True, False, True], start=1):
        fails = version == 3
        error, errors = both.publish(
            publication(tensors, version, outbox), *([fail] if fails else [])
        )
        assert (
            isinstance(error, PeerLost) == fails
            and [raised is None for raised in errors] == [not fails] * 2
        )
        assert [COMMIT in names for names in both.taken] == [not fails] * 2
        assert outbox.tally.known == known, version
        tensors = [(name, tensor + (name == LATE)) for name, tensor in tensors]
    both.master.finalize()


def actor(rank: int, asked: list[str]) -> Any:
    """QaRL's engine of verl, with tensors that are given instead of gathered."""
    engine: Any = object.__new__(QaRLFSDPEngine)
    engine.quant, engine.rank, engine._outbox = QuantSettings(), rank, DeltaSender()
    engine.lr_scheduler, engine._wire_tensors = (
        SimpleNamespace(last_epoch=1),
        lambda: iter(weights("llama")),
    )
    engine._servers = SimpleNamespace(ask=lambda: asked.append("asked"), dead=lambda seconds: {})
    return engine


def test_the_actor_asks_the_servers_only_if_verl_publishes_itself(monkeypatch, tmp_path):
    """With a checkpoint engine they wait for tensors at that time. Only the first rank's stream is sent, so only that
    rank keeps the tensors, and the turn for this host's sockets is the rollout worker's."""
    monkeypatch.setattr(host_turn, "FOLDER", tmp_path)
    asked: list[str] = []
    first, second = actor(0, asked), actor(1, asked)
    for known in (False, True):
        stream, _ = first.get_per_tensor_param()
        assert list(tmp_path.iterdir()) == []
        stream.receivers[:] = [first._outbox.cache.fingerprint] * 2
        for _ in stream:
            pass
        assert first._outbox.tally.known == known
    stream, _ = second.get_per_tensor_param()
    assert [n for n, _ in stream if not n.startswith("qarl.")] == list(dict(weights("llama")))
    assert second._outbox.cache.tensors == {} and asked == []
    stream, _ = first.get_per_tensor_param(
        layered_summon=False, base_sync_done=True
    )  # as verl's naive backend
    assert asked == ["asked"] and len(list(tmp_path.rglob("*.holder"))) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_device_gets_no_changes_and_keeps_nothing(rank, monkeypatch, tmp_path):
    """Whatever `publish_delta` says. Engines with devices of their own get changes from the first rank."""
    monkeypatch.setattr(host_turn, "FOLDER", tmp_path)
    for shared, wanted in ((True, False), (False, rank == 0)):
        made = actor(rank, [])
        stream, _ = made.get_per_tensor_param(base_sync_done=shared)
        list(stream)
        assert (made._outbox.cache.tensors != {}) is wanted


def test_an_error_of_the_sender_does_not_stop_the_gathers_of_other_ranks(monkeypatch):
    """All ranks gather each tensor together. The first rank reads to the end whatever happens to its receivers."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    master, seen, all_names = (
        QaRLCheckpointEngine(is_master=True, host="127.0.0.1"),
        [],
        dict(weights("llama")),
    )

    def gathers() -> Any:
        for name, tensor in weights("llama"):
            seen.append(name)
            yield name, tensor

    master.prepare()
    with pytest.raises(PeerLost, match="1 of 1 receivers did not answer"):  # nobody comes
        asyncio.run(master.send_weights(publication(gathers(), 1, DeltaSender())))
    assert seen == list(all_names)

    monkeypatch.setenv(TIMEOUT_VARIABLE, "20")
    seen.clear()
    both = InThreads(1)

    def fail(worker: int, name: str) -> None:
        raise OSError("killed")

    error, errors = both.publish(publication(gathers(), 1, DeltaSender()), fail)
    assert isinstance(error, PeerLost) and "killed" in str(errors[0]) and seen == list(all_names)
    both.master.finalize()
    master.finalize()


def test_the_topology_and_the_other_ranks():
    """Three ranks of the actor, two rollout workers: only the first rank sends, and the others iterate too."""
    engines = [QaRLCheckpointEngine(is_master=rank == 0, host="127.0.0.1") for rank in range(3)]
    metadata = [engine.prepare() for engine in engines] + [{}, {}]
    actor, rollout = QaRLCheckpointEngine.build_topology(3, 2, metadata)
    assert (actor["rank"], rollout["rank"]) == ([0, 1, 2], [3, 4])
    for rank, engine in enumerate(engines):
        engine.init_process_group(**{key: value[rank] for key, value in actor.items()})
    assert engines[0].server.receivers == 2 and engines[1].server is None
    stream = iter(weights("llama"))
    asyncio.run(engines[1].send_weights(stream))
    assert list(stream) == []
    assert engines[0].prepare()["token"] != metadata[0]["token"], "a new one for every publish"
    engines[0].finalize()
    assert engines[0].server is None


@pytest.mark.verl
@pytest.mark.slow
def test_the_actor_asks_no_server_that_waits_for_its_tensors(tmp_path: Path) -> None:
    """verl has both sides at work at once. The publishes take changes where they can, and one that fails in the engine
    is followed by a full one."""
    output = run_ranks("verl_separate.py", 1, tmp_path)
    publishes = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(publishes) == 5
    assert [entry["error"] == "" for entry in publishes] == [True, True, False, True, True], (
        publishes
    )
    assert "no memory" in publishes[2]["error"] and publishes[2]["version"] is None
    assert [entry["version"] for entry in publishes if not entry["error"]] == [1, 2, 4, 5]
    assert all(entry["equal"] for entry in publishes if not entry["error"])
    assert [entry["delta"] for entry in publishes] == [False, True, True, False, True]
    assert max(entry["seconds"] for entry in publishes) < 15, (
        "less than the time limit of a question to the servers"
    )
