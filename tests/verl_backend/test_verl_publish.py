"""Publishes through verl's sockets: several runs on one host, errors in the worker, sockets on which nobody answers."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import zmq
from checkout import ROOT

from qarl.errors import UserError
from qarl.rollout.publish.send import encode_publish
from qarl.rollout.publish.wire import UNIT, TransferFailed

pytest.importorskip("verl")
pytest.importorskip("vllm")

from qarl.verl.plugin import publish
from qarl.verl.plugin.publish import Publication, decode, numbered, publish_timeout, run_identity

TENSORS = [("model.norm.weight", torch.ones(4))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "SOCKET_FOLDER", tmp_path)
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    return tmp_path


@pytest.mark.parametrize("sender", ["host/2/01000000", "host/1/02000000", "other/1/01000000"])
def test_weights_of_another_run_are_refused_by_name(sender):
    stream = decode(numbered(encode_publish(TENSORS, version=3, run=sender)), run="host/1/01000000")
    with pytest.raises(TransferFailed, match="the weights of another run") as caught:
        list(stream)
    assert sender in caught.value.where and "host/1/01000000" in caught.value.where


def test_the_identity_is_that_of_rays_processes(monkeypatch):
    seen = set()
    for raylet, job in (("1", "01000000"), ("2", "01000000"), ("2", "02000000")):
        monkeypatch.setenv("RAY_RAYLET_PID", raylet)
        monkeypatch.setenv("RAY_JOB_ID", job)
        assert run_identity() == run_identity()
        seen.add(run_identity())
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["RAY_RAYLET_PID", "RAY_JOB_ID"])
def test_a_process_that_does_not_know_its_run_does_not_publish(monkeypatch, name):
    """Two of them would take each other's weights."""
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match="cannot tell which run") as caught:
        Publication(iter(())).reserve()
    assert name in caught.value.where


def publish_as(run: str, folder, events, hold: float, ready, together) -> None:
    """Ask for the turn once everybody is `ready`; keep it `hold` seconds after all ranks of the run have it."""
    publish.SOCKET_FOLDER = folder
    publish.run_identity = lambda: run
    ready.wait(30)
    held = Publication(iter(())).reserve()
    events.put((time.monotonic(), run, "begin"))
    together.wait(30)
    time.sleep(hold)
    events.put((time.monotonic(), run, "end"))
    del held


def start(*runs: str, folder, hold: float):
    """A process for each of `runs`, and the queue of what they do."""
    fork = multiprocessing.get_context("fork")
    events, ready = fork.Queue(), fork.Barrier(len(runs))
    together = {run: fork.Barrier(runs.count(run)) for run in runs}
    arguments = [(run, folder, events, hold, ready, together[run]) for run in runs]
    processes = [fork.Process(target=publish_as, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    return processes, events


def test_runs_wait_for_each_other_and_ranks_of_one_do_not(folder):
    processes, events = start("a", "a", "b", "b", folder=folder, hold=0.2)
    found = sorted(events.get(timeout=60) for _ in range(8))
    for process in processes:
        process.join(60)
    runs = [run for _, run, _ in found]
    assert runs == [runs[0]] * 4 + [runs[4]] * 4 and runs[0] != runs[4]
    for ranks in (found[:4], found[4:]):  # of one run at the same time
        assert [what for _, _, what in ranks] == ["begin", "begin", "end", "end"]


def test_the_turn_of_a_killed_process_is_free(folder):
    (killed,), events = start("a", folder=folder, hold=600.0)
    assert events.get(timeout=60)[1:] == ("a", "begin")
    killed.kill()
    killed.join(60)
    (follower,), events = start("b", folder=folder, hold=0.0)
    assert events.get(timeout=60)[1:] == ("b", "begin")
    follower.join(60)


def test_what_a_stopped_process_keeps_is_an_error_in_time(monkeypatch, folder):
    """Without a limit this process would wait until the other one is continued."""
    context = multiprocessing.get_context("fork")
    (stopped,), events = start("a", folder=folder, hold=60.0)
    assert events.get(timeout=20)[1:] == ("a", "begin")
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "0.05")
    events = context.Queue()  # the other's locks may be held by the stopped process
    waiting = context.Process(target=refused_publish, args=(events,))
    waiting.start()
    try:
        text = events.get(timeout=20)
        assert "another run has blocked publishing on this host for 0.5 s" in text
        assert f"process {stopped.pid}" in text
    finally:
        for process in (stopped, waiting):
            process.kill()
            process.join(20)


def refused_publish(events) -> None:
    context: zmq.Context = zmq.Context.instance()
    try:
        Publication(iter(())).reserve()
    except UserError as error:
        events.put(str(error) if zmq.RCVTIMEO not in context.sockopts else "the sockets keep the time limit")


def is_held(folder) -> bool:
    for path in folder.glob("*/*.holder"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_publication_holds_its_turn_to_the_last_reference(folder, read):
    """verl's sender removes the socket's path after it has read the stream: the turn lasts longer than the stream."""
    context: zmq.Context = zmq.Context.instance()
    publication = Publication(iter(TENSORS * 2)).reserve()
    assert [name for name, _ in (next(publication) for _ in range(read))] == ["model.norm.weight"] * read
    assert is_held(folder) and context.sockopts[zmq.RCVTIMEO] == 120_000
    assert isinstance(publication, Publication)
    del publication
    gc.collect()
    assert not is_held(folder) and zmq.RCVTIMEO not in context.sockopts


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_time_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", text)
    with pytest.raises(UserError, match="QARL_PUBLISH_TIMEOUT"):
        publish_timeout()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("receive") / "results.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "verl_receive.py"), str(output)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("case", "raised", "names"),
    [
        ("well", None, ["part0", "part1", "part2"]),
        ("not made", "ValueError('the engine quantizes other layers')", []),
        # Its traceback must not keep views of the shared memory alive, which then could not be closed.
        ("on the way", "ValueError('no room for part0, 262144 elements')", ["part0"]),
        # The engine would generate with whatever it holds.
        ("stops", "RuntimeError", ["part0", "part1", "part2"]),
        ("nothing", "the publish ended before its first record", []),
    ],
)
def test_the_sender_ends_and_the_worker_raises(results, case, raised, names):
    found = results[case]
    assert found["sent"] and found["errors"] == []
    assert found["names"] == names
    assert found["raised"] is None if raised is None else raised in found["raised"]


def test_a_worker_copies_what_lies_in_a_buffer_that_is_reused(results):
    assert results["reused"] == {"version": 1}


def test_changes_come_through_verls_buckets_and_a_lost_publish_is_noticed(results):
    """The trainer assumes nothing: the worker says what it holds, also after a publish that never came."""
    first, second, last = results["changes"]["publishes"]
    assert [one["raised"] for one in (first, second, last)] == [None] * 3
    assert all(one["equal"] for one in (first, second, last))
    assert [one["version"] for one in (first, second, last)] == [1, 2, 4]
    assert [one["publish/delta"] for one in (first, second, last)] == [0, 1, 0]
    assert second["publish/changed_words"] == 64 and second["publish/mbytes"] < 0.02 * first["publish/mbytes"]
    assert results["changes"]["answers"] == [False, True, True, False]


def test_every_record_survives_a_bucket_which_is_a_dict_by_name():
    tensors = [(f"model.layers.{i}.norm.weight", torch.full((4,), float(i))) for i in range(3)]
    bucket = dict(numbered(encode_publish(tensors, version=7, run="host/1/01")))
    received = list(decode(bucket.items(), run="host/1/01"))
    sent = list(encode_publish(tensors, version=7, run="host/1/01"))
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert [name for name, _ in received].count(UNIT) == 3
    assert all(torch.equal(mine, other) for (_, mine), (_, other) in zip(received, sent, strict=True))
