"""verl's checkpoint-engine interface between two processes, called in the order of verl's manager, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT
from publish_streams import weights

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl.checkpoint_engine import CheckpointEngineRegistry

from qarl.errors import UserError
from qarl.rollout.publish.send import DeltaSender
from qarl.rollout.publish.sockets import PeerLost
from qarl.rollout.publish.wire import COMMIT
from qarl.verl.plugin import engine as engine_module
from qarl.verl.plugin import publishing
from qarl.verl.plugin.checkpoint_engine import QaRLCheckpointEngine
from qarl.verl.plugin.config import QuantSettings
from qarl.verl.plugin.engine import QaRLFSDPEngine
from qarl.verl.plugin.publishing import TIMEOUT_VARIABLE, Publication, run_identity
from qarl.verl.plugin.transport import encode

LATE = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def rays_variables(monkeypatch):
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "60")


def worker(publishes: int, *die_at: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/support/verl_remote.py"), str(publishes), *die_at]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def publish(master: Any, process: Any, stream: Any) -> str:
    """One publish as verl's `CheckpointEngineManager.update_weights` makes it, to one worker. Returns its last line."""
    metadata = [master.prepare(), {}]
    assert process.stdout.readline() == "prepared\n"
    actor, rollout = QaRLCheckpointEngine.build_topology(1, 1, metadata)
    master.init_process_group(**{key: value[0] for key, value in actor.items()})
    process.stdin.write(json.dumps({key: value[0] for key, value in rollout.items()}) + "\n")
    process.stdin.flush()
    asyncio.run(master.send_weights(stream, global_steps=1))
    master.finalize()
    return process.stdout.readline()


def stream_of(outbox: DeltaSender, tensors: Any, version: int) -> Publication:
    """As `QaRLFSDPEngine.get_per_tensor_param` makes it for a checkpoint engine."""
    told: list[str | None] = []
    stream = encode(tensors, version=version, run=run_identity(), outbox=outbox, held=told)
    return Publication(stream, ExitStack(), told)


@pytest.mark.slow
def test_two_processes_and_a_worker_that_is_killed():
    """The worker says what it holds, so that the second publish sends changes. A new worker holds nothing."""
    master = CheckpointEngineRegistry.new("qarl", bucket_size=1 << 20, is_master=True, host="127.0.0.1")
    outbox, tensors = DeltaSender(), weights("llama")
    process = worker(2)
    for version in (1, 2):
        line = publish(master, process, stream_of(outbox, tensors, version))
        assert line.split() == [str(version), outbox.cache.fingerprint] and outbox.tally.known == (version == 2)
        tensors = [(name, tensor + (name == LATE)) for name, tensor in tensors]
    process.wait(timeout=30)

    process = worker(1, LATE)
    start = time.monotonic()
    with pytest.raises(PeerLost, match="the publish lost a receiver"):
        publish(master, process, stream_of(outbox, tensors, 3))
    assert time.monotonic() - start < 60
    process.wait(timeout=30)
    process = worker(1)
    assert publish(master, process, stream_of(outbox, tensors, 3)).split() == ["3", outbox.cache.fingerprint]
    assert not outbox.tally.known
    process.wait(timeout=30)


class InThreads:
    """The actor's first rank and rollout workers, which are threads here. `take`: what a vLLM worker does."""

    def __init__(self, workers: int) -> None:
        self.master = QaRLCheckpointEngine(is_master=True, host="127.0.0.1")
        self.workers = [QaRLCheckpointEngine() for _ in range(workers)]
        self.taken: list[list[str]] = []

    def publish(self, stream: Any, take: Any = lambda worker, name: None) -> tuple[Any, list[Any]]:
        """As verl's manager: it calls `finalize` only if there was no error. Returns the errors of both sides."""
        metadata = [one.prepare() for one in (self.master, *self.workers)]
        actor, rollout = QaRLCheckpointEngine.build_topology(1, len(self.workers), metadata)
        self.master.init_process_group(**{key: value[0] for key, value in actor.items()})
        errors: list[Any] = [None] * len(self.workers)
        self.taken = [[] for _ in self.workers]

        def receive(number: int) -> None:
            engine = self.workers[number]
            engine.init_process_group(**{key: value[number] for key, value in rollout.items()})
            try:
                for name, _ in engine._received(engine.address):
                    take(number, name)
                    self.taken[number].append(name.partition("#")[0])
            except BaseException as error:
                errors[number] = error

        threads = [threading.Thread(target=receive, args=(number,)) for number in range(len(self.workers))]
        for one in threads:
            one.start()
        error = None
        try:
            asyncio.run(self.master.send_weights(stream))
        except BaseException as caught:
            error = caught
        for one in threads:
            one.join(30)
        if error is None and errors == [None] * len(self.workers):
            for one in (self.master, *self.workers):
                one.finalize()
        return error, errors


def test_workers_say_what_they_hold_only_after_a_publish_that_was_complete_for_all():
    """If one worker fails, no vLLM worker gets the last record, and the next publish sends all tensors."""
    both, outbox, tensors = InThreads(2), DeltaSender(), weights("llama")

    def fail(worker: int, name: str) -> None:
        if worker == 1 and name == LATE:
            raise OSError("no memory")

    for version, known in enumerate([False, True, True, False, True], start=1):
        fails = version == 3
        error, errors = both.publish(stream_of(outbox, tensors, version), *([fail] if fails else []))
        assert isinstance(error, PeerLost) == fails and [one is None for one in errors] == [not fails] * 2
        assert [COMMIT in names for names in both.taken] == [not fails] * 2
        assert outbox.tally.known == known, version
        tensors = [(name, tensor + (name == LATE)) for name, tensor in tensors]
    both.master.finalize()


def actor(rank: int, asked: list[str]) -> Any:
    """QaRL's engine of verl, with tensors that are given instead of gathered."""
    engine: Any = object.__new__(QaRLFSDPEngine)
    engine.quant, engine.rank, engine._outbox = QuantSettings(), rank, DeltaSender()
    engine.lr_scheduler, engine._wire_tensors = SimpleNamespace(last_epoch=1), lambda: iter(weights("llama"))
    engine._servers = SimpleNamespace(ask=lambda: asked.append("asked"), dead=lambda seconds: {})
    return engine


def test_the_actor_asks_the_servers_only_if_verl_publishes_itself(monkeypatch, tmp_path):
    """With a checkpoint engine they wait for tensors at that time. Only the first rank's stream is sent, so only that
    rank keeps the tensors, and the turn for this host's sockets is the rollout worker's."""
    monkeypatch.setattr(publishing, "SOCKET_FOLDER", tmp_path)
    asked: list[str] = []
    first, second = actor(0, asked), actor(1, asked)
    for known in (False, True):
        stream, config = first.get_per_tensor_param()
        assert isinstance(stream, Publication) and config is None and list(tmp_path.iterdir()) == []
        stream.tell([first._outbox.cache.fingerprint] * 2)
        for _ in stream:
            pass
        assert first._outbox.tally.known == known
    stream, _ = second.get_per_tensor_param()
    assert [n for n, _ in stream if not n.startswith("qarl.")] == list(dict(weights("llama")))
    assert second._outbox.cache.tensors == {} and asked == []
    stream, _ = first.get_per_tensor_param(layered_summon=False, base_sync_done=True)  # as verl's naive backend
    assert asked == ["asked"] and len(list(tmp_path.rglob("*.holder"))) == 1
    stream.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_shared_gpu_gets_no_changes_and_keeps_nothing(device, rank, monkeypatch, tmp_path):
    """Whatever `publish.delta` says. Engines with devices of their own get changes from the first rank."""
    monkeypatch.setattr(publishing, "SOCKET_FOLDER", tmp_path)
    monkeypatch.setattr(engine_module, "get_device_name", lambda: device)
    used: dict[str, Any] = {}
    monkeypatch.setattr(engine_module, "encode", lambda tensors, outbox, **_: iter([used.update(outbox=outbox)]))
    made = actor(rank, [])
    for shared, wanted in ((True, device == "cpu"), (False, rank == 0)):
        stream, _ = made.get_per_tensor_param(base_sync_done=shared)
        list(stream)
        assert used.pop("outbox") is (made._outbox if wanted else None)


def test_an_error_of_the_sender_does_not_stop_the_gathers_of_other_ranks(monkeypatch):
    """All ranks gather each tensor together. The first rank reads to the end whatever happens to its receivers."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    master, seen, all_names = QaRLCheckpointEngine(is_master=True, host="127.0.0.1"), [], dict(weights("llama"))

    def gathers() -> Any:
        for name, tensor in weights("llama"):
            seen.append(name)
            yield name, tensor

    master.prepare()
    with pytest.raises(PeerLost, match="1 of 1 receivers did not answer"):  # nobody comes
        asyncio.run(master.send_weights(stream_of(DeltaSender(), gathers(), 1)))
    assert seen == list(all_names)

    seen.clear()
    master.prepare()
    with pytest.raises(UserError, match="weights that QaRL's engine did not make"):
        asyncio.run(master.send_weights(gathers()))
    assert seen == list(all_names)

    monkeypatch.setenv(TIMEOUT_VARIABLE, "20")
    seen.clear()
    both = InThreads(1)

    def fail(worker: int, name: str) -> None:
        raise OSError("killed")

    error, errors = both.publish(stream_of(DeltaSender(), gathers(), 1), fail)
    assert isinstance(error, PeerLost) and "killed" in str(errors[0]) and seen == list(all_names)
    both.master.finalize()
    master.finalize()


def test_an_error_while_the_rest_is_read_does_not_hide_the_first_one(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
    master = QaRLCheckpointEngine(is_master=True, host="127.0.0.1")
    master.prepare()
    spoilt = [(name, tensor * float("nan")) for name, tensor in weights("llama")]
    with pytest.raises(PeerLost):
        asyncio.run(master.send_weights(stream_of(DeltaSender(), spoilt, 1)))
    master.finalize()


def test_the_topology_and_the_other_ranks():
    """Three ranks of the actor, two rollout workers: only the first rank sends, and the others iterate too."""
    engines = [QaRLCheckpointEngine(is_master=rank == 0, host="127.0.0.1") for rank in range(3)]
    metadata = [engine.prepare() for engine in engines] + [{}, {}]
    actor, rollout = QaRLCheckpointEngine.build_topology(3, 2, metadata)
    assert actor["rank"] == [0, 1, 2] and rollout["rank"] == [3, 4]
    assert {len(value) for value in actor.values()} == {3} and {len(value) for value in rollout.values()} == {2}
    for rank, engine in enumerate(engines):
        engine.init_process_group(**{key: value[rank] for key, value in actor.items()})
    assert engines[0].server.receivers == 2 and engines[1].server is None
    seen: list[str] = []
    stream = ((seen.append(name), (name, tensor))[1] for name, tensor in weights("llama"))
    asyncio.run(engines[1].send_weights(stream))
    assert len(seen) == len(weights("llama"))
    first = metadata[0]["token"]
    assert engines[0].prepare()["token"] != first, "a new one for every publish"
    for engine in engines:
        engine.finalize()
    assert engines[0].server is None
