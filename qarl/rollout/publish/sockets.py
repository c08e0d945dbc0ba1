"""Carries a publish between processes or hosts over TCP: one sender, one connection per receiver and publish.

    receiver -> sender    hello: the shared token, and the fingerprint of the tensors that the receiver holds
    sender -> receiver    the stream of `qarl.rollout.publish.wire`, one frame per tensor or record
    receiver -> sender    the answer, after the last record: the version and the fingerprint that it holds now, or its
                          error. A receiver that fails reads the rest of the stream first, so its answer is not lost

A frame is a JSON header, preceded by its length, and the tensor's bytes. Nothing is unpickled. TCP delivers bytes in
order, and reports at once that a peer was killed. Every operation has a time limit, because TCP does not report a peer
that is stopped or a host that is gone. The publish is checked like every other one (manifest, checksums, versions).

The token only prevents mistakes, such as a connection to the engine of another run. The data are not encrypted. So, as
with NCCL and verl's transports, use this only inside a trusted network.
"""

from __future__ import annotations

import hmac
import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from qarl.rollout.publish.wire import COMMIT, NamedTensor, TransferFailed

DEFAULT_SECONDS = 120.0
_HELLO_SECONDS = 10.0
_MAX_HELLO = 1 << 12
_MAX_HEADER = 1 << 20
_PIECE = 1 << 20
Address = tuple[str, int]
MakeStream = Callable[[Sequence[str | None]], Iterator[NamedTensor]]


class PeerLost(TransferFailed):
    """The other side of a publish was killed, or did not answer in time."""


class WeightServer:
    """The sender's side. It listens until `close`. `address`: host and port for the receivers.

    `token`: a secret that both sides know. `receivers`: number of receivers in every publish. `seconds`: limit for the
    receivers to connect, and for every single read and write after that."""

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        receivers: int = 1,
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        self.token, self.receivers, self.seconds = token, receivers, seconds
        self._socket = socket.create_server((host, port))
        self.address: Address = self._socket.getsockname()[:2]

    def publish(self, make_stream: MakeStream) -> list[str | None]:
        """Send one publish to all receivers. Return the fingerprints that they hold afterwards.

        `make_stream`: returns the stream, given the fingerprints that the receivers hold before.

        Raises:
            PeerLost: a receiver did not connect, or was lost in the middle.
            TransferFailed: a receiver refused the publish. The message has its error.
        """
        with ExitStack() as open_sockets:
            peers, held = self._accept(open_sockets)
            for name, tensor in make_stream(held):
                data = _bytes_of(tensor)
                header = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for peer in peers:
                    with _lost("a receiver", self.seconds):
                        _send(peer, header, data)
            answers = []
            for peer in peers:
                with _lost("a receiver", self.seconds):
                    answers.append(_receive_header(peer))
        for answer in answers:
            if answer.get("error"):
                raise TransferFailed(
                    "the engine refused the publish", why=str(answer["error"]), fix="publish again, with all tensors"
                )
        return [answer.get("held") for answer in answers]

    def _accept(self, open_sockets: ExitStack) -> tuple[list[socket.socket], list[str | None]]:
        peers: list[socket.socket] = []
        held: list[str | None] = []
        end = time.monotonic() + self.seconds
        while len(peers) < self.receivers:
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            with _lost(f"{self.receivers - len(peers)} of {self.receivers} receivers", self.seconds):
                peer, _ = self._socket.accept()
            open_sockets.callback(peer.close)
            try:
                hello = _receive_header(peer, most=_MAX_HELLO, end=min(end, time.monotonic() + _HELLO_SECONDS))
            except (OSError, TransferFailed):  # not a receiver, or one that is gone: the others may still come
                continue
            if not hmac.compare_digest(repr(hello.get("token")).encode(), repr(self.token).encode()):
                continue
            if _is_closed(peer):
                continue
            peer.settimeout(self.seconds)
            peers.append(peer)
            held.append(hello.get("held"))
        return peers, held

    def close(self) -> None:
        self._socket.close()


class WeightClient:
    """The receiver's side of one publish. Use it in a `with` block, which closes the connection.

    Raises:
        PeerLost: nobody listens at `address`, or the sender was lost.
    """

    def __init__(
        self, address: Address, token: str, *, held: str | None = None, seconds: float = DEFAULT_SECONDS
    ) -> None:
        self.seconds = seconds
        with _lost(f"the trainer at {address[0]}:{address[1]}", seconds):
            self._socket = socket.create_connection((address[0], address[1]), timeout=seconds)
        with _lost("the trainer", seconds):
            _send(self._socket, {"token": token, "held": held})

    def stream(self) -> Iterator[NamedTensor]:
        """Yield the tensors and records of the publish, up to its last record. Each tensor has its own memory.

        The names of records may end with a number that a transport added, for example `qarl.commit#7`."""
        name = ""
        while name.partition("#")[0] != COMMIT:
            with _lost("the trainer", self.seconds):
                header = _receive_header(self._socket)
                name, tensor = str(header["name"]), _receive_tensor(self._socket, header)
            yield name, tensor

    def answer(self, *, version: int | None = None, held: str | None = None, error: str | None = None) -> None:
        """Tell the sender how the publish ended."""
        with _lost("the trainer", self.seconds):
            _send(self._socket, {"version": version, "held": held, "error": error})

    def feed(self, receiver: Any) -> None:
        """Feed the publish to `receiver` (`qarl.rollout.publish.receive.WeightReceiver`), and answer.

        Raises:
            UserError: what the receiver raised, or `PeerLost`. After any error the receiver is stale.
        """
        stream = self.stream()
        try:
            receiver.feed(stream)
        except PeerLost:
            raise
        except BaseException as error:
            with suppress(PeerLost):
                for _ in stream:
                    pass
                self.answer(error=f"{type(error).__name__}: {error}"[:4000])
            raise
        if receiver.stale:
            raise TransferFailed(receiver.stale_because, fix="publish again")
        self.answer(version=receiver.version, held=receiver.held)

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


class _lost:
    """Turns errors of a socket into `PeerLost`."""

    def __init__(self, who: str, seconds: float) -> None:
        self.who, self.seconds = who, seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, OSError):
            late = isinstance(error, TimeoutError)
            raise PeerLost(
                f"{self.who} did not answer for {self.seconds:g} s" if late else f"the publish lost {self.who}",
                why=f"{type(error).__name__}: {error}; it was killed, is stuck, or the network failed",
                fix="start it again if it is gone, then publish again: all tensors will be sent",
            ) from error


def _send(peer: socket.socket, header: dict[str, Any], data: memoryview | bytes = b"") -> None:
    content = json.dumps(header).encode()
    peer.sendall(len(content).to_bytes(4, "big") + content)
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):  # the time limit is for one piece, not for a tensor of any size
        peer.sendall(view[start : start + _PIECE])


def _is_closed(peer: socket.socket) -> bool:
    """Return whether the peer has gone. One that gave up earlier may have left a whole hello behind."""
    peer.setblocking(False)
    try:
        return not peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _receive(peer: socket.socket, size: int, end: float | None = None) -> bytearray:
    """Return `size` bytes. `end`: time limit for all of them (`time.monotonic`), besides the socket's for each read."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        if end is not None:
            peer.settimeout(max(end - time.monotonic(), 1e-3))
        count = peer.recv_into(view[have : have + _PIECE])
        if not count:
            raise ConnectionResetError("the connection was closed in the middle")
        have += count
    return data


def _receive_header(peer: socket.socket, *, most: int = _MAX_HEADER, end: float | None = None) -> dict[str, Any]:
    size = int.from_bytes(_receive(peer, 4, end), "big")
    content: Any = None
    if size <= most:
        with suppress(ValueError, RecursionError):
            content = json.loads(_receive(peer, size, end))
    if not isinstance(content, dict):
        raise TransferFailed(
            "a frame of a publish cannot be read",
            why=f"its header has {size} bytes and is not a JSON object",
            fix="publish again; if the error comes back, another program uses this port",
        )
    return content


def _receive_tensor(peer: socket.socket, header: dict[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, str(header.get("dtype")), None), header.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise TransferFailed("a frame of a publish has no dtype or shape", why=str(header)[:200], fix="publish again")
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = _receive(peer, count * dtype.itemsize)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return flat.numpy().data if flat.numel() else b""
