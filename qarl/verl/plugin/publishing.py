"""What a publish through verl's sockets lacks: a sender that belongs to the receiver, and an end when one of them dies.

verl names its socket by Ray's job id, replica and rank (verl/workers/rollout/vllm_rollout/vllm_rollout.py), and the job
id is `01000000` in every Ray that a run starts for itself: two runs on one host bind the same path, each after removing
the other's, and an engine takes whichever weights it is connected to. So runs of QaRL publish one after the other on a
host (`turn_on_host`), and the first record of a publish names its run (`run_identity`), which the worker compares.

verl's sender and receiver wait for each other without end. Their sockets get a time limit from the context that verl
makes them with (`socket_timeouts`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import zmq

from qarl.errors import UserError
from qarl.rollout.publish.wire import NamedTensor

TIMEOUT_VARIABLE = "QARL_PUBLISH_TIMEOUT"
DEFAULT_TIMEOUT = 120.0
SOCKET_FOLDER = Path("/tmp")
"""Where verl puts its sockets, whatever TMPDIR says."""
_POLL_SECONDS = 0.02
_REPORT_SECONDS = 60.0

_log = logging.getLogger("qarl.verl.plugin")


def run_identity() -> str:
    """The same text in all processes of a run on one host, and another one in any other run there.

    Sender and receiver of a publish are always on one host: they share memory. The Raylet's process id is that of the
    run's own Ray; where several runs share a Ray, their job ids differ.
    """
    parts = (socket.gethostname(), os.environ.get("RAY_RAYLET_PID", ""), os.environ.get("RAY_JOB_ID", ""))
    return "/".join(parts)


def publish_timeout() -> float:
    """Seconds that one side waits for the next message of the other. UserError for a bad QARL_PUBLISH_TIMEOUT."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UserError(
            f"{TIMEOUT_VARIABLE}={text!r} is not a time limit",
            where=f"the environment variable {TIMEOUT_VARIABLE}",
            fix="give seconds above 0, or leave it out",
        )
    return seconds


@contextmanager
def socket_timeouts(seconds: float) -> Iterator[None]:
    """Sockets that are made from zmq's global context in here fail with `zmq.Again` after waiting `seconds`."""
    context: zmq.Context[Any] = zmq.Context.instance()
    before = {option: context.sockopts.get(option) for option in (zmq.RCVTIMEO, zmq.SNDTIMEO)}
    for option in before:
        context.setsockopt(option, round(seconds * 1000))
    try:
        yield
    finally:
        for option, value in before.items():
            if value is None:
                context.sockopts.pop(option, None)
            else:
                context.setsockopt(option, value)


@contextmanager
def turn_on_host(run: str, folder: Path | None = None) -> Iterator[None]:
    """Hold this host's sockets of verl's for `run`: processes of one run share them, those of others wait.

    A holder is a locked file; the lock of a process that dies is free. Where the folder cannot be used nothing is held:
    `run_identity` still finds a swap.
    """
    folder = folder or SOCKET_FOLDER / f"qarl-publish-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mine = _wait_for_turn(folder, run.replace("/", "_"))
    except OSError as error:
        _log.warning("publishes of several runs on this host are not kept apart: %s: %s", folder, error)
        yield
        return
    try:
        yield
    finally:
        Path(mine.name).unlink(missing_ok=True)
        mine.close()


def _wait_for_turn(folder: Path, run: str) -> IO[str]:
    """This process's locked file in `folder`, once no process of another run has one."""
    start = reported = time.monotonic()
    while True:
        with (folder / "guard").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            holder = next((path for path in folder.glob("*.holder") if not path.name.startswith(run + ".")), None)
            if holder is None or _is_abandoned(holder):
                if holder is None:
                    mine = (folder / f"{run}.{os.getpid()}.holder").open("w")
                    fcntl.flock(mine, fcntl.LOCK_EX)
                    return mine
                continue
        now = time.monotonic()
        if now - reported > _REPORT_SECONDS:
            reported = now
            _log.warning("this publish has waited %.0f s for one of another run: %s", now - start, holder)
        time.sleep(_POLL_SECONDS)


def _is_abandoned(holder: Path) -> bool:
    """Whether nobody holds the file; it is removed then."""
    try:
        with holder.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    holder.unlink(missing_ok=True)
    return True


class Publication:
    """The stream of one publish. `held` is closed with the last reference to it: after verl's sender has cleaned up,
    whether the stream was read to its end, in part or not at all."""

    def __init__(self, stream: Iterator[NamedTensor], held: ExitStack) -> None:
        self._stream = stream
        self._release = weakref.finalize(self, held.close)

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        return next(self._stream)

    def close(self) -> None:
        self._release()


def guarded(stream: Iterator[NamedTensor]) -> Publication:
    """`stream` as a `Publication` that holds this host's turn and the time limits of the sockets."""
    held = ExitStack()
    held.enter_context(socket_timeouts(publish_timeout()))
    held.enter_context(turn_on_host(run_identity()))
    return Publication(stream, held)
