"""A publish through verl's sockets: the trainer's side, and the code that trainer and engine share. A publish reaches
only engines of the same run. If either side dies, it ends.

verl names its socket by Ray's job id, replica and rank (verl/workers/rollout/vllm_rollout/vllm_rollout.py). The job id
is `01000000` in every Ray that a run starts itself. So two runs on one host bind the same path, each removes the
other's socket, and an engine may receive the other run's weights. Therefore QaRL runs on one host publish one after the
other (`turn_on_host`). The first record of a publish also names its run (`run_identity`). The worker checks this name.

verl's sender and receiver wait for each other without a limit. verl makes their sockets from a zmq context, and
`socket_timeouts` sets a time limit in that context. Waiting for a turn has a time limit too. Before a publish the first
rank asks the servers whether they are alive (`qarl.verl.ask_servers`).

verl puts the tensors of a bucket into a dict by name (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py),
but several records of `qarl.rollout.remote.wire` have the same name. So each record gets a number in its name while it
is sent (`numbered`).

`QaRLCheckpointEngine` publishes to rollout engines on other GPUs or hosts, through verl's checkpoint-engine interface:

    actor_rollout_ref.rollout.checkpoint_engine.backend=qarl
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=qarl.verl.publish

verl uses checkpoint engines only in trainers with separate rollout workers (`trainer_separate_async` and those in
verl/experimental). Its synchronous trainers share the GPUs and set the backend `naive`.

The actor's first rank sends the stream of a publish once to every rollout worker over TCP
(`qarl.rollout.remote.sockets`). The other ranks only take part in the gathers. Each rollout worker passes the stream
to its vLLM worker, as verl does with any backend. QaRL's receiver in the vLLM worker makes the usual checks of a
publish. verl's own backends send full BF16 tensors, or deltas of BF16 tensors.

During a publish, the vLLM workers wait for tensors and answer no questions. So each rollout worker stores the
fingerprint of the tensors in its vLLM worker. It updates this fingerprint in `finalize`, which verl calls only after a
publish that is complete on all workers. If the fingerprint is wrong, the vLLM worker's receiver refuses the delta. A
rollout worker passes on the last record only after all rollout workers have the whole stream.

The stream names its run by the host's Raylet, and each host has a different Raylet. So a rollout worker replaces the
actor's Raylet in the stream with its own. A token proves that actor and rollout worker belong to one run. The actor
makes a new token for every publish, and verl's manager sends it to the rollout workers. If Ray has nodes on several
hosts, the actor listens at the address of its node, otherwise at the loopback address.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

import zmq
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from qarl.errors import UserError
from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.sockets import Address, WeightClient, WeightServer, own_address
from qarl.rollout.remote.wire import (
    BEGIN,
    COMMIT,
    DeltaSender,
    TransferFailed,
    encode_publish,
    is_record,
    read_record,
    record,
)

TIMEOUT_VARIABLE = "QARL_PUBLISH_TIMEOUT"
DEFAULT_TIMEOUT = "120"
TURN_LIMITS = 10
"""A run waits for its turn up to this many times `publish_timeout`, which limits the wait for a single message."""
RUN_VARIABLES = ("RAY_RAYLET_PID", "RAY_JOB_ID")
SOCKET_FOLDER = Path("/tmp")
"""The folder of verl's sockets. verl ignores TMPDIR."""
_POLL_SECONDS = 0.02

_numbers = count()


def run_identity() -> str:
    """Return a text that is the same in all processes of a run on one host, and different for every other run on it.

    Sender and receiver of a publish are always on one host, because they share memory. Runs with separate Rays have
    different Raylet process ids. Runs that share a Ray have different job ids. Ray sets environment variables with
    both ids in its workers, and vLLM's processes inherit them. Raise UserError if one of the variables is missing.
    """
    if missing := [name for name in RUN_VARIABLES if not os.environ.get(name)]:
        raise UserError(
            "this process cannot tell which run it belongs to, so it does not publish",
            where="the environment variables " + ", ".join(missing),
            why="Ray sets them in its workers; without them a publish could reach another run's engine unnoticed",
            fix="start the run through verl's trainer, and do not unset Ray's variables",
        )
    return "/".join((socket.gethostname(), *(os.environ[name] for name in RUN_VARIABLES)))


def publish_timeout() -> float:
    """Return the seconds that each side waits for the next message. Raise UserError for a bad QARL_PUBLISH_TIMEOUT."""
    text = os.environ.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    what = f"{TIMEOUT_VARIABLE}={text!r} is not a time limit"
    fix = "set a number of seconds above 0, or unset it"
    raise UserError(what, where="the environment variables", fix=fix)


@contextmanager
def socket_timeouts(seconds: float) -> Iterator[None]:
    """Inside this block, new sockets of zmq's global context raise `zmq.Again` after waiting `seconds`."""
    context: zmq.Context[Any] = zmq.Context.instance()
    before = dict(context.sockopts)
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        context.setsockopt(option, round(seconds * 1000))
    try:
        yield
    finally:
        context.sockopts.clear()
        context.sockopts.update(before)


@contextmanager
def turn_on_host(run: str, *, seconds: float) -> Iterator[None]:
    """Reserve verl's sockets on this host for `run`. Processes of one run share them. Processes of other runs wait.

    Each process that uses the sockets locks a file. The system frees the lock if the process dies.

    Raise UserError if the turn does not come within `seconds`, because a process of another run is stopped or stuck.
    """
    folder = SOCKET_FOLDER / f"qarl-publish-{os.getuid()}"
    deadline = time.monotonic() + seconds
    folder.mkdir(mode=0o700, exist_ok=True)
    while isinstance(mine := _try_turn(folder, run.replace("/", "_")), Path):
        if time.monotonic() > deadline:
            raise UserError(
                f"another run has blocked publishing on this host for {seconds:g} s",
                where=str(mine),
                why="the process in its name (RUN.PROCESS.NUMBER.holder) is stopped or stuck in a publish; runs on one "
                "host publish one after the other",
                fix="continue or end that process, then run the same command again: it resumes from the last "
                f"checkpoint; the limit is {TURN_LIMITS} times {TIMEOUT_VARIABLE}",
            )
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        Path(mine.name).unlink(missing_ok=True)
        mine.close()


def _try_turn(folder: Path, run: str) -> IO[str] | Path:
    """Return the file in `folder` that a process of another run has locked. Without one, lock and return this process's
    file. Locks are only tried, never waited for, because their process may be stopped."""
    with (folder / "guard").open("w") as guard:
        if not _lock(guard):
            return Path(guard.name)
        for path in folder.glob("*.holder"):
            if not path.name.startswith(f"{run}."):
                with suppress(FileNotFoundError), path.open("r+") as file:
                    if not _lock(file):
                        return path
                    path.unlink()  # its process has died
        # The number tells files of one process apart: a traceback may keep an earlier publish alive.
        mine = (folder / f"{run}.{os.getpid()}.{next(_numbers)}.holder").open("w")
        _lock(mine)
        return mine


def _lock(file: IO[str]) -> bool:
    """Try to lock an open file. Return whether this process has the lock now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Publication:
    """The stream of one publish, which verl's sender reads. If `reserve` was called, turn and time limits are released
    when nothing refers to the stream any more. verl's sender has then cleaned up, whether it read the whole stream, a
    part of it or nothing.

    `receivers`: the fingerprint that each receiver has (see `DeltaSender.stream`), if they are known before the first
    tensor is read."""

    def __init__(
        self, stream: Iterator[NamedTensor], receivers: list[str | None] | None = None
    ) -> None:
        self._stream = stream
        self.receivers = [] if receivers is None else receivers
        self._reserved = ExitStack()
        weakref.finalize(self, self._reserved.close)

    def reserve(self) -> Publication:
        """Take this host's turn, and set the time limits of the sockets. Return the publication.

        Raise UserError as `run_identity`, `publish_timeout` and `turn_on_host` do."""
        seconds = publish_timeout()
        with ExitStack() as reserved:
            reserved.enter_context(socket_timeouts(seconds))
            reserved.enter_context(turn_on_host(run_identity(), seconds=TURN_LIMITS * seconds))
            self._reserved.push(reserved.pop_all())
        return self

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        return next(self._stream)


def publication(
    tensors: Iterable[NamedTensor], version: int, outbox: DeltaSender | None = None
) -> Publication:
    """Return the publish of `tensors` as `version` by this run. With an `outbox`, only changes are sent, if all
    `receivers` of the publication have what it sent last."""
    receivers: list[str | None] = []
    options: dict[str, Any] = {"version": version, "run": run_identity()}
    if outbox is None:
        return Publication(numbered(encode_publish(tensors, **options)))
    return Publication(numbered(outbox.stream(tensors, receivers=receivers, **options)), receivers)


def numbered(stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the stream of a publish with unique names of its records."""
    numbers = count()
    for name, tensor in stream:
        yield (f"{name}#{next(numbers)}" if is_record(name) else name), tensor


def decode(tensors: Iterable[NamedTensor], *, run: str) -> Iterator[NamedTensor]:
    """Undo `numbered`. Raise `TransferFailed` if a publish of a run other than `run` begins."""
    for name, tensor in tensors:
        plain, _, number = name.rpartition("#")
        name = plain if number.isdecimal() and is_record(plain) else name
        sender = read_record(BEGIN, tensor).get("run") if name == BEGIN else run
        if sender != run:
            raise TransferFailed(
                "the engine was sent the weights of another run",
                where=f"sent by {sender or 'a run without a name'}, expected from {run} (host/Raylet/Ray job)",
                why="two runs on this host use one socket: verl names it by Ray's job id, which is the same in every "
                "Ray that a run starts for itself",
                fix="run the same command again: it resumes from the last checkpoint. Runs of QaRL wait for each "
                "other, so the other run is not one of QaRL, or uses another version",
            )
        yield name, tensor


@CheckpointEngineRegistry.register("qarl")
class QaRLCheckpointEngine(CheckpointEngine):
    """One side of a publish. verl calls its methods in the order of this class, once per publish.

    `is_master`: whether this is the actor's first rank. `bucket_size`: not used. `host`: the address of the actor's
    host that the rollout workers can reach. By default `own_address` chooses it. To set it, use
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.qarl.host."""

    wire_format = "named_tensors"

    def __init__(
        self, bucket_size: int = 0, is_master: bool = False, host: str | None = None
    ) -> None:
        self.is_master = is_master
        self.host = host
        self.token = ""
        self.address: Address = ("", 0)
        self.server: WeightServer | None = None
        self._fingerprint: str | None = None
        self._arrived: str | None = None

    def prepare(self) -> dict[str, Any]:
        """Start to listen, and return the address and a new token. Ranks other than the actor's first return {}."""
        self._close()  # verl does not call `finalize` after a failed publish
        if not self.is_master:
            return {}
        self.token = secrets.token_hex(16)
        self.server = WeightServer(
            self.token, host=self.host or own_address(), seconds=publish_timeout()
        )
        return {"address": self.server.address, "token": self.token}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for every rank of the actor and for every rollout worker."""
        (master,) = [rank for rank in metadata[:actor_wg_world_size] if rank]

        same = master | {"receivers": rollout_world_size}

        def arguments(first: int, size: int) -> dict[str, list[Any]]:
            return {"rank": list(range(first, first + size))} | {
                key: [value] * size for key, value in same.items()
            }

        return arguments(0, actor_wg_world_size), arguments(actor_wg_world_size, rollout_world_size)

    def init_process_group(self, **arguments: Any) -> None:
        """Store the arguments that `build_topology` returned for this rank. Connections are made later."""
        self.address = arguments["address"]
        self.token = arguments["token"]
        if self.server is not None:
            self.server.receivers = arguments["receivers"]

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send `weights`, the actor's `get_per_tensor_param`. All ranks of the actor call this together.

        Raises:
            PeerLost: a rollout worker was killed or did not answer within QARL_PUBLISH_TIMEOUT.
            TransferFailed: a rollout worker refused the publish.
        """
        try:
            if self.server is not None:

                def stream(known: Sequence[str | None]) -> Iterator[NamedTensor]:
                    weights.receivers[:] = known
                    return iter(weights)

                self.server.publish(stream)
        except BaseException:
            with suppress(Exception):  # a second error must not hide the first
                _read_all(weights)
            raise
        _read_all(weights)

    def receive_weights(self, global_steps: int | None = None) -> Publication:  # type: ignore[override]  # async in verl
        """Return the received stream, for verl to send to the vLLM worker on this host. Its sockets have time limits.

        Raises:
            PeerLost: the actor was lost. This is raised in the middle of the stream.
            TransferFailed: a different rollout worker did not get the publish. This is raised at the end of the stream.
        """
        return Publication(self._received()).reserve()

    def _received(self) -> Iterator[NamedTensor]:
        fingerprint = self._fingerprint
        self._fingerprint = None
        self._arrived = None
        with WeightClient(
            self.address, self.token, fingerprint=fingerprint, seconds=publish_timeout()
        ) as client:
            for name, tensor in client.stream():
                plain = name.partition("#")[0]
                if plain == BEGIN:
                    yield (
                        name,
                        record(BEGIN, read_record(BEGIN, tensor) | {"run": run_identity()})[1],
                    )
                    continue
                if plain == COMMIT:
                    fingerprint = read_record(COMMIT, tensor).get("fingerprint")
                    client.answer(fingerprint=fingerprint)
                    self._arrived = fingerprint
                yield name, tensor

    def finalize(self) -> None:
        """End a publish that was complete on all workers. verl does not call this after an error."""
        self._fingerprint = self._arrived
        self._arrived = None
        self._close()

    def _close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def _read_all(weights: Any) -> None:
    """Read the rest of `weights`, because all ranks of the actor must take part in the gather of each tensor."""
    for _ in weights:
        pass
