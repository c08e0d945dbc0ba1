"""Publishes to another process: the same checks, and clear errors in bounded time when that process is lost."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from publish_streams import engine_model, receiver, weights
from ranks import fork

from qarl.errors import UserError
from qarl.rollout.publish.manifest import TensorSpec
from qarl.rollout.remote import sockets
from qarl.rollout.remote.delta import PublishedCache
from qarl.rollout.remote.records import TransferFailed
from qarl.rollout.remote.sockets import (
    LOOPBACK,
    SMALLEST_LIMIT,
    PeerLost,
    WeightClient,
    WeightServer,
    _bytes_of,
    _proof,
    _receive_header,
    _send,
    own_address,
)
from qarl.rollout.remote.wire import DeltaSender, encode_publish

TOKEN = "of this run"
LATE = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def server():
    server = WeightServer(TOKEN, seconds=300)
    yield server
    server.close()


@pytest.fixture
def start(server, tmp_path):
    """Start a receiver. What is returned waits for its end, and returns its exit code and what it printed."""

    def begin(publishes: int = 1, *die_at: str) -> Any:
        log = tmp_path / f"{publishes}{len(die_at)}"
        process = fork("remote_receiver.py", log, *server.address, TOKEN, publishes, *die_at)
        return lambda: (process.join(60), process.exitcode, log.read_text())[1:]

    return begin


def moved(tensors: list) -> list:
    return [(name, tensor + (name == LATE)) for name, tensor in tensors]


def stream_of(sender: DeltaSender, tensors: list, version: int, receivers: Any) -> Any:
    return sender.stream(tensors, version=version, receivers=receivers)


@pytest.mark.long
def test_another_process_gets_the_same_tensors_and_then_changes(server, start):
    sender, tensors = DeltaSender(), weights("llama")
    ended = start(3)
    for version in (1, 2, 3):
        fingerprints = server.publish(partial(stream_of, sender, tensors, version))
        assert fingerprints == [sender.cache.fingerprint], (
            "of the version and of the checksums of all tensors"
        )
        assert sender.metrics()["publish/delta"] == (version > 1)
        tensors = moved(tensors)
    code, printed = ended()
    lines = printed.splitlines()
    assert code == 0 and [line.split()[:2] for line in lines] == [
        [str(v), "False"] for v in (1, 2, 3)
    ]
    assert lines[-1].split()[2] == sender.cache.fingerprint


@pytest.mark.long
def test_a_receiver_killed_in_the_middle_and_one_that_comes_back(server, start):
    """It is noticed at once. The next publish sends all tensors."""
    sender, tensors, begun = DeltaSender(), weights("llama"), []

    def stream(receivers: Any) -> Any:
        begun.append(time.monotonic())
        return sender.stream(tensors, version=1, receivers=receivers)

    ended = start(1, LATE)
    with pytest.raises(PeerLost, match="the publish lost a receiver"):
        server.publish(stream)
    assert time.monotonic() - begun[0] < 10
    assert ended()[0] == -signal.SIGKILL
    ended = start()
    assert server.publish(stream) == [sender.cache.fingerprint] and not sender.tally.known
    assert ended()[1].split()[:2] == ["1", "False"]


def publish_in_thread(server: WeightServer, make_stream: Any) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(server.publish(make_stream))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def feeders_of(clients: list[WeightClient], receivers: list[Any]) -> list[threading.Thread]:
    """Threads that feed a publish to each receiver, which is stale after an error."""

    def feed(client: WeightClient, engine: Any) -> None:
        with client, suppress(UserError, OSError):
            client.feed(engine)

    pairs = zip(clients, receivers, strict=True)
    return [threading.Thread(target=feed, args=pair, daemon=True) for pair in pairs]


def client_of(server: WeightServer, engine: Any, seconds: float = 10) -> WeightClient:
    return WeightClient(server.address, TOKEN, fingerprint=engine.fingerprint, seconds=seconds)


def test_a_refusal_reaches_both_sides(server):
    """The receiver reads to the end first, so that the sender learns why."""
    engine, tensors = receiver(engine_model("llama")), weights("llama")
    spoilt = [(name, tensor[:1] if name == LATE else tensor) for name, tensor in tensors]
    spoilt[-1] = (spoilt[-1][0], torch.zeros(1 << 24))  # more than the sockets' buffers hold
    thread, outcome = publish_in_thread(server, lambda _: encode_publish(spoilt, version=1))
    with client_of(server, engine) as client, pytest.raises(Exception, match="the engine expects"):
        client.feed(engine)
    thread.join(20)
    assert (
        isinstance(outcome[0], TransferFailed)
        and "the engine expects" in str(outcome[0])
        and engine.stale
    )


def test_if_one_worker_refuses_no_worker_has_the_publish():
    """Otherwise the workers of one engine would hold weights of two versions. The next publish sends all tensors."""
    server = WeightServer(TOKEN, receivers=2, seconds=20)
    pair, sender, tensors = (
        [receiver(engine_model("llama")) for _ in range(2)],
        DeltaSender(),
        weights("llama"),
    )
    take = pair[1]._take
    for version, fails in ((1, False), (2, True), (3, False), (4, False)):

        def failing(name: str, tensor: Any, fails: bool = fails) -> None:
            if fails and name == LATE:
                raise OSError("no memory")
            take(name, tensor)

        pair[1]._take = failing
        thread, outcome = publish_in_thread(server, partial(stream_of, sender, tensors, version))
        feeders = feeders_of([client_of(server, engine) for engine in pair], pair)
        for feeder in feeders:
            feeder.start()
        for feeder in (*feeders, thread):
            feeder.join(20)
        if fails:
            assert isinstance(outcome[0], TransferFailed) and "1 of 2 workers" in str(outcome[0])
            assert "no memory" in str(outcome[0])
            assert [engine.fingerprint for engine in pair] == [None, None] and all(
                engine.stale for engine in pair
            )
            assert "another worker did not get the publish" in pair[
                0
            ].stale_because and "no memory" in str(pair[0].stale_because)
        else:
            assert (
                outcome == [[sender.cache.fingerprint] * 2]
                and [f.weights.version for f in pair] == [version] * 2
            )
        assert sender.tally.known == (version in (2, 4))
        tensors = moved(tensors)
    server.close()


def test_a_sender_that_dies_before_its_verdict(server):
    """The receiver cannot know whether the others have the publish, so it is stale."""
    engine = receiver(engine_model("llama"))
    listener, _ = false_trainer(
        *encode_publish(weights("llama"), version=1, cache=PublishedCache()), token=TOKEN
    )
    with WeightClient(listener.getsockname(), TOKEN, seconds=5) as client, pytest.raises(PeerLost):
        client.feed(engine)
    assert engine.stale and engine.fingerprint is None
    listener.close()


@pytest.mark.parametrize("when", ["before", "middle"])
def test_the_sender_fails(server, when):
    """A loss in the trainer: the receiver ends at once, and is stale."""
    engine, tensors = receiver(engine_model("llama")), weights("llama")

    def stream(_: Any):
        if when == "middle":
            yield from list(encode_publish(tensors, version=1))[:4]
        raise OSError("the trainer's memory is gone")

    thread, outcome = publish_in_thread(server, stream)
    start = time.monotonic()
    with client_of(server, engine) as client, pytest.raises(PeerLost, match="lost the trainer"):
        client.feed(engine)
    thread.join(20)
    assert time.monotonic() - start < 5 and engine.stale and "memory is gone" in str(outcome[0])


def test_nobody_comes_and_nobody_listens():
    server, start = WeightServer(TOKEN, seconds=0.3), time.monotonic()
    with pytest.raises(PeerLost, match=r"1 of 1 receivers did not answer for 0\.3 s"):
        server.publish(lambda _: iter(()))
    assert time.monotonic() - start < 15
    server.close()
    with pytest.raises(PeerLost, match=r"lost the trainer at 127\.0\.0\.1"):
        WeightClient(server.address, TOKEN, seconds=1)


def node(address: str, alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (None, LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.1"), node("10.0.0.2", alive=False)], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.2")], "10.0.0.1"),
    ],
    ids=["no Ray", "the other host is gone", "two hosts"],
)
def test_in_a_ray_cluster(monkeypatch, nodes, expected):
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    ray = SimpleNamespace(is_initialized=lambda: nodes is not None, nodes=lambda: nodes, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert own_address() == expected


def test_towards_a_server():
    """Loopback for a server of this host. For another host, an address of this host at which one can listen."""
    assert own_address("localhost") == own_address("127.0.0.1") == LOOPBACK
    try:
        address = own_address("192.0.2.1")  # reserved for documentation; nothing is sent
    except UserError:
        pytest.skip("this machine has no route to other hosts")
    assert address != LOOPBACK and address != "192.0.2.1"
    socket.create_server((address, 0)).close()
    with pytest.raises(
        UserError, match="cannot find an address of this host that the engine at no-such-host"
    ):
        own_address("no-such-host.invalid")


def false_trainer(
    *frames: tuple[str, torch.Tensor], token: str
) -> tuple[socket.socket, list[dict[str, Any]]]:
    """A program that listens, proves `token`, sends `frames` and closes the connection."""
    listener, heard = socket.create_server(("127.0.0.1", 0)), []

    def run() -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            _send(peer, {"challenge": "theirs"})
            heard.append(_receive_header(peer))
            _send(peer, {"proof": _proof(token, "sender", "theirs", heard[0]["challenge"])})
            for name, tensor in frames:
                _send(peer, {"name": name, "spec": str(TensorSpec.of(tensor))}, _bytes_of(tensor))

    threading.Thread(target=run, daemon=True).start()
    return listener, heard


def test_a_sender_must_prove_the_token_too():
    listener, heard = false_trainer(token="of another run")
    with pytest.raises(TransferFailed, match="is not the trainer of this run"):
        WeightClient(listener.getsockname(), TOKEN, seconds=5)
    assert TOKEN not in json.dumps(heard), "the token is not sent"
    listener.close()


def test_a_tensor_beyond_the_limit_is_refused():
    listener, _ = false_trainer(
        ("a", torch.empty(SMALLEST_LIMIT + 1, dtype=torch.uint8)), token=TOKEN
    )
    with (
        WeightClient(listener.getsockname(), TOKEN, seconds=5, limit=100) as client,
        pytest.raises(TransferFailed, match="which is more than"),
    ):
        next(client.stream())
    listener.close()


HELLOS: dict[str, dict[str, Any]] = {
    "no challenge": {"proof": "a"},
    "the token itself": {"token": TOKEN, "challenge": "a", "proof": TOKEN, "fingerprint": None},
    "a proof for another challenge": {
        "challenge": "a",
        "proof": _proof(TOKEN, "receiver", "earlier", "a"),
    },
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_receiver_comes_after_a_program_that_is_not_of_this_run(server, hello, monkeypatch):
    """One that closes at once, and one that stays connected."""
    monkeypatch.setattr(sockets, "_HELLO_SECONDS", 1.0)
    tensor = torch.arange(8.0)
    for stays in (False, True):
        thread, outcome = publish_in_thread(
            server, lambda _: encode_publish([("a.weight", tensor)], version=1)
        )
        stranger = socket.create_connection(server.address)
        _send(stranger, hello)
        if not stays:
            stranger.close()
        with WeightClient(server.address, TOKEN, seconds=15) as client:
            assert torch.equal(dict(client.stream())["a.weight"], tensor)
            client.answer(fingerprint="a")
        thread.join(20)
        assert outcome == [["a"]]
        stranger.close()
