"""The trainer's side of a publish through verl's sockets. It reaches only engines of its own run, and ends if either
side dies.

verl names its socket by Ray's job id, replica and rank (verl/workers/rollout/vllm_rollout/vllm_rollout.py). The job id
is `01000000` in every Ray that a run starts itself. So two runs on one host bind the same path, each removes the
other's socket, and an engine may receive the other run's weights. Therefore QaRL runs on one host publish one after the
other (`turn_on_host`). The first record of a publish also names its run (`run_identity`). The worker checks this name.

verl's sender and receiver wait for each other without a limit. verl makes their sockets from a zmq context, and
`socket_timeouts` sets a time limit in that context. Waiting for a turn has a time limit too. Before a publish the first
rank asks the servers whether they are alive (`qarl.verl.plugin.servers`).

verl puts the tensors of a bucket into a dict by name (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py),
but several records of `qarl.rollout.publish.wire` have the same name. So each record gets a number in its name while it
is sent (`numbered`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

import zmq

from qarl.errors import UserError
from qarl.rollout.publish.send import DeltaSender, encode_publish
from qarl.rollout.publish.wire import BEGIN, NamedTensor, TransferFailed, is_record, read_record

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
    what, fix = f"{TIMEOUT_VARIABLE}={text!r} is not a time limit", "set a number of seconds above 0, or unset it"
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
    folder, deadline = SOCKET_FOLDER / f"qarl-publish-{os.getuid()}", time.monotonic() + seconds
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

    `receivers`: the list that the stream reads when it begins, with the fingerprint that each receiver has."""

    def __init__(self, stream: Iterator[NamedTensor], receivers: list[str | None] | None = None) -> None:
        self._stream, self._receivers = stream, [] if receivers is None else receivers
        self._reserved = ExitStack()
        weakref.finalize(self, self._reserved.close)

    def tell(self, fingerprints: Sequence[str | None]) -> None:
        """Say what each receiver has (see `DeltaSender.stream`), before the first tensor is read."""
        self._receivers[:] = fingerprints

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
    tensors: Iterable[NamedTensor],
    version: int,
    outbox: DeltaSender | None = None,
    receivers: list[str | None] | None = None,
) -> Publication:
    """Return the publish of `tensors` as `version` by this run. With an `outbox`, only changes are sent, if all
    `receivers` have what it sent last: their fingerprints, which `Publication.tell` may also say later."""
    known: list[str | None] = [] if receivers is None else receivers
    options: dict[str, Any] = {"version": version, "run": run_identity()}
    stream = outbox.stream(tensors, held=known, **options) if outbox else encode_publish(tensors, **options)
    return Publication(numbered(stream), known)


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
