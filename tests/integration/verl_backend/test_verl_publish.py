"""Publishes through verl's sockets: several runs on one host, errors in the worker, sockets on which nobody answers."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import zmq
from publish_streams import engine_model, engine_weights
from ranks import RAYS, run_ranks

from qarl.errors import UserError
from qarl.rollout.remote.receive import StreamReceiver
from qarl.rollout.remote.records import UNIT, TransferFailed, without_number
from qarl.rollout.remote.sockets import PeerLost
from qarl.rollout.remote.wire import encode_publish, numbered

pytest.importorskip("verl")
pytest.importorskip("vllm")

from qarl.rollout.remote import host_turn
from qarl.rollout.remote.host_turn import turn_on_host
from qarl.verl.ask_servers import RESUME
from qarl.verl.failures import as_user_error, what_resumes
from qarl.verl.publication import publish_timeout, refuse_other_run, reserved


def nothing() -> Iterator[tuple[str, torch.Tensor]]:
    yield from ()


turn = partial(turn_on_host, limit="a test sets the limit")
TENSORS = [("model.norm.weight", torch.ones(4))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(host_turn, "FOLDER", tmp_path)
    for name, value in RAYS.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize("sender", ["host/2/01000000", "host/1/02000000", "other/1/01000000"])
def test_weights_of_another_run_are_refused_by_name(sender):
    check_begin = partial(refuse_other_run, run="host/1/01000000")
    weights = engine_weights(engine_model("llama"))
    receiver = StreamReceiver(weights, check_begin=check_begin)
    with pytest.raises(TransferFailed, match="the weights of another run") as caught:
        receiver.feed(encode_publish(TENSORS, version=3, run=sender))
    assert weights.stale
    assert sender in caught.value.where and "host/1/01000000" in caught.value.where
    assert caught.value.fix.endswith(RESUME)


@pytest.mark.parametrize(
    "error", [TransferFailed("lost"), PeerLost("lost")], ids=lambda error: type(error).__name__
)
def test_what_a_failed_publish_advises_is_what_the_command_will_do(tmp_path, error):
    """The driver says it, because the worker does not know whether there is a checkpoint to resume from."""
    told = as_user_error(error, tmp_path)
    assert told.fix == f"{error.fix}: {what_resumes(tmp_path)}" and "starts fresh" in told.fix


@pytest.mark.parametrize("name", ["RAY_RAYLET_PID", "RAY_JOB_ID"])
def test_a_process_that_does_not_know_its_run_does_not_publish(monkeypatch, name):
    """Two of them would take each other's weights."""
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match="cannot tell which run") as caught:
        reserved(nothing())
    assert name in caught.value.where


def test_runs_wait_for_each_other_and_ranks_of_one_do_not():
    with turn("host/1/a", seconds=0.1), turn("host/1/a", seconds=0.1):
        with pytest.raises(
            UserError, match="another run has blocked publishing on this host"
        ) as caught:
            turn("host/1/b", seconds=0.1).__enter__()
        assert f".{os.getpid()}." in caught.value.where
        assert caught.value.fix.endswith(RESUME)
    with turn("host/1/b", seconds=0.1):
        pass


def test_the_turn_of_a_killed_process_is_free(folder):
    """The system frees its lock."""
    program = "import sys, time, fcntl; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('ok')"
    left = folder / f"qarl-publish-{os.getuid()}" / "a.1.0.holder"
    left.parent.mkdir()
    command = [sys.executable, "-c", f"{program}; sys.stdout.flush(); time.sleep(60)", str(left)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ok\n"
        with pytest.raises(UserError, match="blocked publishing"):
            turn("b", seconds=0.1).__enter__()
        process.kill()
        process.wait()
    with turn("b", seconds=0.1):
        assert not left.exists()


def test_a_refused_turn_leaves_no_time_limit(monkeypatch):
    monkeypatch.setenv("QARL_PUBLISH_TIMEOUT", "0.01")
    with turn("another", seconds=1), pytest.raises(UserError, match="blocked publishing"):
        reserved(nothing())
    assert zmq.RCVTIMEO not in zmq.Context.instance().sockopts


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
    publication = reserved(item for item in TENSORS * 2)
    assert [name for name, _ in (next(publication) for _ in range(read))] == [
        "model.norm.weight"
    ] * read
    assert is_held(folder) and context.sockopts[zmq.RCVTIMEO] == 120_000
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
    run_ranks("verl_receive.py", 1, output, **RAYS)
    return json.loads(output.read_text())


def test_a_worker_says_why_it_has_no_adapter(results):
    assert results["adapter"] == [
        ["nothing has been published to it yet", False],
        [["v1", 3], True],
        ["a publish failed", False],
        ["vLLM has the adapters [] now", False],
    ]


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
    outcome = results[case]
    assert outcome["sent"] and outcome["errors"] == []
    assert outcome["names"] == names
    assert outcome["raised"] is None if raised is None else raised in outcome["raised"]


def test_a_worker_copies_what_lies_in_a_buffer_that_is_reused(results):
    assert results["reused"] == {"version": 1}


def test_changes_come_through_verls_buckets_and_a_lost_publish_is_noticed(results):
    """The trainer assumes nothing: the worker says what it holds, also after a publish that never came."""
    first, second, last = results["changes"]["publishes"]
    assert [outcome["raised"] for outcome in (first, second, last)] == [None] * 3
    assert all(outcome["equal"] for outcome in (first, second, last))
    assert [outcome["version"] for outcome in (first, second, last)] == [1, 2, 4]
    assert [outcome["publish/delta"] for outcome in (first, second, last)] == [0, 1, 0]
    assert (
        second["publish/changed_words"] == 64
        and second["publish/mbytes"] < 0.02 * first["publish/mbytes"]
    )


def test_every_record_survives_a_bucket_which_is_a_dict_by_name():
    tensors = [(f"model.layers.{i}.norm.weight", torch.full((4,), float(i))) for i in range(3)]
    bucket = dict(numbered(encode_publish(tensors, version=7, run="host/1/01")))
    received = [(without_number(name), tensor) for name, tensor in bucket.items()]
    sent = list(encode_publish(tensors, version=7, run="host/1/01"))
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert [name for name, _ in received].count(UNIT) == 3
    assert all(
        torch.equal(mine, other) for (_, mine), (_, other) in zip(received, sent, strict=True)
    )
