"""Programs that connect to a publish and are not of this run: what they say must cost neither time nor memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from qarl.rollout.publish import sockets
from qarl.rollout.publish.send import encode_publish
from qarl.rollout.publish.sockets import SMALLEST_LIMIT, WeightClient, WeightServer, _receive_header, _send
from qarl.rollout.publish.wire import TransferFailed

TOKEN = "of this run"
TENSORS = [("model.layers.0.w.weight", torch.arange(8.0))]


@pytest.fixture(autouse=True)
def short_hellos(monkeypatch):
    monkeypatch.setattr(sockets, "_HELLO_SECONDS", 1.0)


@pytest.fixture
def server():
    found = WeightServer(TOKEN, seconds=20)
    yield found
    found.close()


def publish(server: WeightServer) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(server.publish(lambda held: encode_publish(TENSORS, version=1)))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def healthy(server: WeightServer) -> None:
    """A receiver of this run, which must get the publish whatever came before it."""
    with WeightClient(server.address, TOKEN, seconds=15) as client:
        assert torch.equal(dict(client.stream())["model.layers.0.w.weight"], TENSORS[0][1])
        client.answer(version=1, held="a")


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


HELLOS = {
    "half a length": b"\x00\x00",
    "a length beyond the limit": (1 << 31).to_bytes(4, "big") + b"x" * 100,
    "no JSON": framed(b"\xff\xfe"),
    "no object": framed(b"3"),
    "no challenge": framed(b'{"proof":"a"}'),
    "the token itself": framed(json.dumps({"token": TOKEN, "challenge": "a", "proof": TOKEN}).encode()),
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_any_hello_is_survived(server, hello):
    """One that closes at once, and one that stays connected."""
    for stays in (False, True):
        thread, outcome = publish(server)
        stranger = socket.create_connection(server.address)
        stranger.sendall(hello)
        if not stays or len(hello) < 4:
            stranger.close()
        healthy(server)
        thread.join(20)
        assert outcome == [["a"]]
        stranger.close()


def test_a_slow_hello_has_one_limit_for_all_of_it(server):
    """Each byte comes within the limit of a single read."""
    thread, outcome = publish(server)
    stranger, stop = socket.create_connection(server.address), threading.Event()

    def drip() -> None:
        stranger.sendall((1000).to_bytes(4, "big"))
        while not stop.wait(0.2):
            try:
                stranger.sendall(b"x")
            except OSError:
                return

    dripping, start = threading.Thread(target=drip, daemon=True), time.monotonic()
    dripping.start()
    healthy(server)
    thread.join(20)
    stop.set()
    dripping.join(5)
    assert outcome == [["a"]] and time.monotonic() - start < 8


def test_a_replayed_proof_is_no_proof(server):
    """What one receiver said in an earlier publish, said again."""
    said: list[bytes] = []
    thread, _ = publish(server)
    peer = socket.create_connection(server.address)
    theirs = _receive_header(peer)["challenge"]
    hello = {"challenge": "mine", "proof": sockets._proof(TOKEN, "receiver", theirs, "mine"), "held": None}
    _send(peer, hello)
    said.append(framed(json.dumps(hello).encode()))
    assert _receive_header(peer)["proof"] == sockets._proof(TOKEN, "sender", theirs, "mine")
    peer.close()
    thread.join(20)
    thread, outcome = publish(server)
    with socket.create_connection(server.address) as again:
        again.sendall(said[0])
        assert "challenge" in _receive_header(again)
        with pytest.raises(OSError):
            _receive_header(again)
    healthy(server)
    thread.join(20)
    assert outcome == [["a"]]


def false_trainer(*frames: dict[str, Any], token: str | None = None) -> tuple[socket.socket, list[dict[str, Any]]]:
    """A program that listens, and says `frames` to who connects. With `token` it proves it first."""
    listener, heard = socket.create_server(("127.0.0.1", 0)), []

    def run() -> None:
        peer, _ = listener.accept()
        with peer:
            _send(peer, {"challenge": "theirs"})
            heard.append(_receive_header(peer))
            if token is not None:
                _send(peer, {"proof": sockets._proof(token, "sender", "theirs", heard[0]["challenge"])})
            for frame in frames:
                _send(peer, frame)
            peer.settimeout(5)
            with suppress(OSError):
                peer.recv(1)

    threading.Thread(target=run, daemon=True).start()
    return listener, heard


@pytest.mark.parametrize("proof", ["0" * 64, None])
def test_a_sender_must_prove_the_token_too(proof):
    listener, heard = false_trainer({"proof": proof})
    with pytest.raises(TransferFailed, match="is not the trainer of this run"):
        WeightClient(listener.getsockname(), TOKEN, seconds=5)
    assert TOKEN not in json.dumps(heard), "the token is not sent"
    listener.close()


FRAMES: dict[str, tuple[dict[str, Any], str]] = {
    "no dtype": ({"name": "a"}, "no dtype or shape"),
    "an attribute of torch that is no dtype": ({"name": "a", "dtype": "ones", "shape": [1]}, "no dtype or shape"),
    "a negative size": ({"name": "a", "dtype": "bfloat16", "shape": [-1]}, "which is more than"),
    "one byte too large": ({"name": "a", "dtype": "uint8", "shape": [SMALLEST_LIMIT + 1]}, "which is more than"),
}


@pytest.mark.parametrize(("frame", "error"), FRAMES.values(), ids=FRAMES)
def test_frames_that_no_trainer_sends(monkeypatch, frame, error):
    """They are refused from their header. No memory is allocated for them."""
    listener, _ = false_trainer(frame, token=TOKEN)
    sizes: list[int] = []
    receive = sockets._receive
    monkeypatch.setattr(
        sockets, "_receive", lambda peer, size, end=None: (sizes.append(size), receive(peer, size, end))[1]
    )
    with (
        WeightClient(listener.getsockname(), TOKEN, seconds=5, limit=100) as client,
        pytest.raises(TransferFailed, match=error),
    ):
        next(client.stream())
    assert max(sizes) < 10_000
    listener.close()
