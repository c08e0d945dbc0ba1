"""Sends a publish to receivers in other processes or on other hosts over TCP. Each publish makes new connections.

    sender -> receiver    a challenge
    receiver -> sender    hello: the receiver's challenge, its proof, and the fingerprint of its cache
    sender -> receiver    the sender's proof, then the stream of `qarl.rollout.remote.wire`, one frame per tensor
    receiver -> sender    the answer after the last record: its new version and fingerprint, or its error. A receiver
                          that fails first reads the rest of the stream, so that its answer is not lost.
    sender -> receiver    the verdict: whether all receivers have the publish. If one lacks it, all others become stale,
                          because otherwise the workers of one engine could have weights of two versions.

A frame is the length of a JSON header, this header, and the tensor's bytes. Pickle is not used. TCP delivers bytes in
order, and reports a killed peer at once. Every operation has a time limit, because TCP does not report a stopped
process or a lost host. The publish has the usual checks (manifest, checksums, versions).

Both sides know a token. Each proves this by a keyed hash of both challenges (RFC 2104), so the token is never sent. A
receiver allocates memory only for a sender that has proved the token, and only up to a limit. The data is neither
encrypted nor signed. So use this only inside a trusted network, like NCCL and verl's transports.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from qarl.errors import UserError
from qarl.rollout.publish.manifest import NamedTensor, TensorSpec
from qarl.rollout.remote.records import COMMIT, RETRY, TransferFailed, without_number

DEFAULT_SECONDS = 120.0
_HELLO_SECONDS = 10.0
_MAX_HEADER = 1 << 20
_PIECE = 1 << 20
SMALLEST_LIMIT = 1 << 26
"""Every frame may have at least this number of bytes, for records and for deltas of small tensors."""
DEFAULT_LIMIT = 1 << 33
"""Largest number of bytes of a frame for a receiver that has no manifest. The embedding of a model with a vocabulary of
256,000 and a hidden size of 16,384 is smaller."""
LOOPBACK = "127.0.0.1"
Address = tuple[str, int]
MakeStream = Callable[[Sequence[str | None]], Iterator[NamedTensor]]


def own_address(peer: str | None = None) -> str:
    """Return the address of this host to which receivers connect: the loopback address if all are on this host.

    Otherwise it is the address of Ray's node, or of the network interface that leads to the engine's server.
    `socket.gethostbyname` of the host's own name would not work, because Debian's /etc/hosts maps it to 127.0.1.1.

    `peer`: name or address of the engine's host. If it is None, the receivers are in this process's Ray cluster, or, if
    there is no cluster, on this host.

    Raises:
        UserError: `peer` has no IPv4 address that this host can reach.
    """
    if peer is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # no packet is sent
            try:
                probe.connect((peer, 9))
            except OSError as error:
                raise UserError(
                    f"the trainer cannot find an address of this host that the engine at {peer} can reach",
                    why=f"{type(error).__name__}: {error}",
                    fix="set `host` to an address of this host that the engine can reach",
                ) from error
            return str(probe.getsockname()[0])
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if len(hosts) < 2 else str(ray.util.get_node_ip_address())


class PeerLost(TransferFailed):
    """The other side of a publish was killed, or did not answer in time."""


class WeightServer:
    """The sender's side. It listens until `close`. `address`: host and port for the receivers.

    `token`: a secret that both sides know. `receivers`: number of receivers in every publish. `seconds`: time limit for
    all receivers to connect, and for each later read and write. A read of a receiver's hello is limited to
    `_HELLO_SECONDS`."""

    def __init__(
        self,
        token: str,
        *,
        host: str = LOOPBACK,
        receivers: int = 1,
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        self.token = token
        self.receivers = receivers
        self.seconds = seconds
        self._socket = socket.create_server((host, 0))
        self.address: Address = self._socket.getsockname()[:2]

    def publish(self, make_stream: MakeStream) -> list[str | None]:
        """Send one publish to all receivers. Return their new fingerprints.

        `make_stream`: a function that takes the receivers' fingerprints before the publish and returns the stream.

        Raises:
            PeerLost: a receiver did not connect, or was lost during the publish.
            TransferFailed: a receiver refused the publish. The message contains the receiver's error.
        """
        with ExitStack() as open_sockets:
            peers, fingerprints = self._accept(open_sockets)
            for name, tensor in make_stream(fingerprints):
                header = {"name": name, "spec": str(TensorSpec.of(tensor))}
                data = _bytes_of(tensor)
                with _lost("a receiver", self.seconds):
                    for peer in peers:
                        _send(peer, header, data)
            with _lost("a receiver", self.seconds):
                answers = [_receive_header(peer) for peer in peers]
                errors = [str(answer["error"]) for answer in answers if answer.get("error")]
                briefly = "; ".join(text.partition("\n")[0][:200] for text in errors[:4])
                for peer in peers:
                    _send(peer, {"complete": not errors, "why": briefly})
        if errors:
            what = f"{len(errors)} of {len(answers)} workers of the engines refused the publish"
            raise TransferFailed(what, why=errors[0])
        return [answer["fingerprint"] for answer in answers]

    def _accept(self, open_sockets: ExitStack) -> tuple[list[socket.socket], list[str | None]]:
        peers: list[socket.socket] = []
        fingerprints: list[str | None] = []
        end = time.monotonic() + self.seconds
        while len(peers) < self.receivers:
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            with _lost(
                f"{self.receivers - len(peers)} of {self.receivers} receivers", self.seconds
            ):
                peer, _ = self._socket.accept()
            open_sockets.callback(peer.close)
            try:
                fingerprints.append(self._welcome(peer)["fingerprint"])
            except (
                OSError,
                KeyError,
                TransferFailed,
            ):  # not a receiver, or a lost one; others may still connect
                peer.close()
                continue
            peer.settimeout(self.seconds)
            peers.append(peer)
        return peers, fingerprints

    def _welcome(self, peer: socket.socket) -> dict[str, Any]:
        """Exchange proofs with a new connection, and return its hello."""
        challenge = secrets.token_hex(16)
        peer.settimeout(_HELLO_SECONDS)
        _send(peer, {"challenge": challenge})
        hello = _receive_header(peer)
        challenges = challenge, str(hello["challenge"])
        if not _proves(hello, _proof(self.token, "receiver", *challenges)):
            raise TransferFailed("a connection did not prove the token of this run")
        _send(peer, {"proof": _proof(self.token, "sender", *challenges)})
        return hello

    def close(self) -> None:
        self._socket.close()


class WeightClient:
    """The receiver's side of one publish. Use it in a `with` block, which closes the connection.

    `limit`: largest number of bytes of a tensor.

    Raises:
        PeerLost: no program listens at `address`, the sender was lost, or it did not begin a publish in time.
        TransferFailed: the sender has a different token.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        *,
        fingerprint: str | None = None,
        seconds: float = DEFAULT_SECONDS,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        self.seconds, self.limit = seconds, max(limit, SMALLEST_LIMIT)
        where = f"{address[0]}:{address[1]}"
        with _lost(f"the trainer at {where}", seconds):
            self._socket = socket.create_connection((address[0], address[1]), timeout=seconds)
        try:
            with _lost(f"the trainer at {where}", seconds):
                self._introduce(token, fingerprint, where)
        except BaseException:
            self._socket.close()
            raise

    def _introduce(self, token: str, fingerprint: str | None, where: str) -> None:
        """Exchange proofs with the sender."""
        challenge = secrets.token_hex(16)
        challenges = str(_receive_header(self._socket).get("challenge")), challenge
        _send(
            self._socket,
            {
                "challenge": challenge,
                "proof": _proof(token, "receiver", *challenges),
                "fingerprint": fingerprint,
            },
        )
        if not _proves(_receive_header(self._socket), _proof(token, "sender", *challenges)):
            raise TransferFailed(
                "the program that sends weights is not the trainer of this run",
                where=where,
                why="it did not prove that it knows the token of this run, so its data was not accepted",
                fix="pass the trainer's address and token again (vLLM), or find the program that took the port (verl)",
            )

    def stream(self) -> Iterator[NamedTensor]:
        """Yield the tensors and records of the publish, up to its last record. Each tensor has its own memory.

        The names of records may end with a number that a transport added, for example `qarl.commit#7`.

        Raises:
            PeerLost: the sender was lost.
            TransferFailed: a tensor has more than `limit` bytes.
        """
        name = ""
        while without_number(name) != COMMIT:
            with _lost("the trainer", self.seconds):
                header = _receive_header(self._socket)
                name = header["name"]
                tensor = _receive_tensor(self._socket, header, self.limit)
            yield name, tensor

    def answer(self, *, fingerprint: str | None = None) -> None:
        """Tell the sender that this receiver has the publish, and wait until all receivers have answered.

        Raises:
            PeerLost: the sender was lost.
            TransferFailed: a different receiver does not have the publish. The caller must not use its weights either.
        """
        with _lost("the trainer", self.seconds):
            _send(self._socket, {"fingerprint": fingerprint})
            verdict = _receive_header(self._socket)
        if not verdict["complete"]:
            raise TransferFailed(
                "another worker did not get the publish, so this one does not use it",
                why=f"the other worker's error: {verdict['why']}. All workers must have weights of one version",
            )

    def feed(self, receiver: Any) -> None:
        """Feed the publish to `receiver` (`qarl.rollout.remote.receive.StreamReceiver`), and answer.

        Raises:
            UserError: the receiver raised it.
            PeerLost: the sender was lost.
            TransferFailed: a different receiver failed.

        After any error the receiver is stale.
        """
        stream = self.stream()
        try:
            receiver.feed(stream)
        except PeerLost:
            raise
        except BaseException as error:
            with suppress(TransferFailed):
                for _ in stream:
                    pass
                with _lost("the trainer", self.seconds):
                    _send(self._socket, {"error": f"{type(error).__name__}: {error}"[:4000]})
            raise
        try:
            self.answer(fingerprint=receiver.fingerprint)
        except TransferFailed as error:
            receiver.mark_stale(f"{error.what}: {error.why}")
            raise

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


@contextmanager
def _lost(who: str, seconds: float) -> Iterator[None]:
    """Turn errors of a socket into `PeerLost`."""
    try:
        yield
    except OSError as error:
        late = isinstance(error, TimeoutError)
        raise PeerLost(
            f"{who} did not answer for {seconds:g} s" if late else f"the publish lost {who}",
            why=f"{type(error).__name__}: {error}; the other side was killed or is stuck, or the network failed",
            fix=f"if the other side is gone, start it again; then {RETRY}",
        ) from error


def _send(peer: socket.socket, header: dict[str, Any], data: memoryview | bytes = b"") -> None:
    content = json.dumps(header).encode()
    peer.sendall(len(content).to_bytes(4, "big") + content)
    view = memoryview(data)
    for start in range(
        0, len(view), _PIECE
    ):  # the time limit is for one piece, not for a tensor of any size
        peer.sendall(view[start : start + _PIECE])


def _proof(token: str, role: str, senders: str, receivers: str) -> str:
    """Return the proof that one side (`role`) knows the token. It is a hash that depends on both challenges."""
    text = json.dumps([role, senders, receivers])
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def _proves(header: dict[str, Any], expected: str) -> bool:
    """Return whether the header contains the expected proof. The comparison takes the same time for every proof."""
    return hmac.compare_digest(str(header.get("proof")).encode(), expected.encode())


def _receive(peer: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    have = 0
    while have < size:
        count = peer.recv_into(view[have : have + _PIECE])
        if not count:
            raise ConnectionResetError(
                "the connection was closed in the middle; a trainer with another token does so"
            )
        have += count
    return data


def _receive_header(peer: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(_receive(peer, 4), "big")
    content: Any = None
    if size <= _MAX_HEADER:
        with suppress(ValueError):
            content = json.loads(_receive(peer, size))
    if not isinstance(content, dict):
        raise TransferFailed(
            "a frame of a publish cannot be read",
            why=f"its header of {size} bytes is not a JSON object",
            fix=f"if the error comes back, another program uses this port; {RETRY}",
        )
    return content


def _receive_tensor(peer: socket.socket, header: dict[str, Any], limit: int) -> torch.Tensor:
    spec = TensorSpec.parse(header["spec"])
    if spec.nbytes > limit:
        raise TransferFailed(
            f"a frame of a publish announces {spec}, which is more than {limit} bytes",
            where=header["name"],
            why="every tensor of this model is smaller, so the sender has a different model",
            fix="start trainer and engine with the same model",
        )
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return (
        torch.frombuffer(_receive(peer, spec.nbytes), dtype=torch.uint8)
        .view(spec.dtype)
        .view(spec.shape)
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return flat.numpy().data if flat.numel() else b""
