"""Publishes of several runs on one host, and sockets on which nobody answers."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import time

import pytest
import torch
import zmq

pytest.importorskip("verl")

from qarl.errors import UserError
from qarl.rollout.publish.wire import TransferFailed
from qarl.verl.plugin import publishing
from qarl.verl.plugin.publishing import Publication, guarded, publish_timeout, run_identity, socket_timeouts
from qarl.verl.plugin.transport import decode, encode

TENSORS = [("model.norm.weight", torch.ones(4))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "SOCKET_FOLDER", tmp_path)
    return tmp_path


def test_the_engine_takes_the_weights_of_its_own_run():
    stream = list(decode(encode(TENSORS, version=3, run="host/1/01000000"), run="host/1/01000000"))
    assert [name for name, _ in stream] == ["qarl.begin", "model.norm.weight", "qarl.unit", "qarl.commit"]


@pytest.mark.parametrize("sender", ["host/2/01000000", "host/1/02000000", "other/1/01000000"])
def test_weights_of_another_run_are_refused_by_name(sender):
    stream = decode(encode(TENSORS, version=3, run=sender), run="host/1/01000000")
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


def publish_as(run: str, folder, events, hold: float) -> None:
    publishing.SOCKET_FOLDER = folder
    publishing.run_identity = lambda: run
    held = guarded(iter(()))
    events.put((time.monotonic(), run, "begin"))
    time.sleep(hold)
    events.put((time.monotonic(), run, "end"))
    del held


def start(run: str, folder, events, hold: float):
    process = multiprocessing.get_context("fork").Process(target=publish_as, args=(run, folder, events, hold))
    process.start()
    return process


def test_runs_wait_for_each_other_and_ranks_of_one_do_not(folder):
    events = multiprocessing.get_context("fork").Queue()
    processes = [start(run, folder, events, 0.4) for run in ("a", "a", "b", "b")]
    for process in processes:
        process.join(20)
    found = sorted(events.get(timeout=5) for _ in range(8))
    runs = [run for _, run, _ in found]
    assert runs == [runs[0]] * 4 + [runs[4]] * 4 and runs[0] != runs[4]
    for ranks in (found[:4], found[4:]):  # of one run at the same time
        assert [what for _, _, what in ranks] == ["begin", "begin", "end", "end"]


def test_the_turn_of_a_killed_process_is_free(folder):
    events = multiprocessing.get_context("fork").Queue()
    killed = start("a", folder, events, 60.0)
    assert events.get(timeout=20)[1:] == ("a", "begin")
    killed.kill()
    killed.join(20)
    events = multiprocessing.get_context("fork").Queue()  # the other's locks may have died with it
    follower = start("b", folder, events, 0.0)
    assert events.get(timeout=10)[1:] == ("b", "begin")
    follower.join(20)


def is_held(folder) -> bool:
    (path,) = [*(folder.glob("*/*.holder")), None][:1]
    if path is None:
        return False
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
    publication = guarded(iter(TENSORS * 2))
    assert [name for name, _ in (next(publication) for _ in range(read))] == ["model.norm.weight"] * read
    assert is_held(folder) and context.sockopts[zmq.RCVTIMEO] == 120_000
    assert isinstance(publication, Publication)
    del publication
    gc.collect()
    assert not is_held(folder) and zmq.RCVTIMEO not in context.sockopts


def test_a_folder_that_cannot_be_used_is_said(monkeypatch, caplog, folder):
    (folder / "file").touch()
    monkeypatch.setattr(publishing, "SOCKET_FOLDER", folder / "file")
    guarded(iter(())).close()
    assert "not kept apart" in caplog.text


def test_a_socket_on_which_nobody_answers_fails_in_time():
    start = time.monotonic()
    with socket_timeouts(0.2):
        socket = zmq.Context.instance().socket(zmq.REP)
    socket.bind(f"ipc://{publishing.SOCKET_FOLDER}/socket")
    with pytest.raises(zmq.Again):
        socket.recv()
    socket.close()
    assert 0.1 < time.monotonic() - start < 5
    assert zmq.Context.instance().socket(zmq.REP).getsockopt(zmq.RCVTIMEO) == -1


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e9"])
def test_a_time_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", text)
    with pytest.raises(UserError, match="QARL_PUBLISH_TIMEOUT"):
        publish_timeout()


def test_a_time_limit_is_taken(monkeypatch):
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "7.5")
    assert publish_timeout() == 7.5
