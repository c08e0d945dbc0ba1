"""verl's checkpoint-engine interface between two processes, called in the order of verl's manager, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from checkout import ROOT
from publish_streams import weights

pytest.importorskip("verl")
pytest.importorskip("vllm")

from verl.checkpoint_engine import CheckpointEngineRegistry

from qarl.rollout.publish.outbox import Outbox
from qarl.rollout.publish.sockets import PeerLost
from qarl.verl.plugin.checkpoint_engine import QaRLCheckpointEngine
from qarl.verl.plugin.publishing import TIMEOUT_VARIABLE, run_identity
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


@pytest.mark.slow
def test_two_processes_and_a_worker_that_is_killed():
    master = CheckpointEngineRegistry.new("qarl", bucket_size=1 << 20, is_master=True, host="127.0.0.1")
    outbox, tensors, held = Outbox(), weights("llama"), None
    process = worker(2)
    for version in (1, 2):
        stream = encode(tensors, version=version, run=run_identity(), outbox=outbox, held=[held])
        line = publish(master, process, stream)
        held = outbox.kept.fingerprint
        assert line.split() == [str(version), held] and outbox.tally.known == (version == 2)
        tensors = [(name, tensor + (name == LATE)) for name, tensor in tensors]
    process.wait(timeout=30)

    process = worker(1, LATE)
    stream = encode(tensors, version=3, run=run_identity(), outbox=outbox, held=[None])
    start = time.monotonic()
    with pytest.raises(PeerLost, match="the publish lost a receiver"):
        publish(master, process, stream)
    assert time.monotonic() - start < 60
    process.wait(timeout=30)
    process = worker(1)
    stream = encode(tensors, version=3, run=run_identity(), outbox=outbox, held=[None])
    assert publish(master, process, stream).split() == ["3", outbox.kept.fingerprint]
    process.wait(timeout=30)


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
