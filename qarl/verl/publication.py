"""A publish through verl's sockets: the trainer's stream, and what trainer and engine share. A publish reaches only
engines of the same run. If either side dies, it ends.

verl names its socket by Ray's job id, replica and rank (verl/workers/rollout/vllm_rollout/vllm_rollout.py). The job id
is `01000000` in every Ray that a run starts itself. So two runs on one host bind the same path, each removes the
other's socket, and an engine may receive the other run's weights. Therefore QaRL runs on one host publish one after the
other (`qarl.rollout.remote.host_turn`). The first record of a publish also names its run (`run_identity`). The worker
checks this name (`refuse_other_run`).

verl's sender and receiver wait for each other without a limit. verl makes their sockets from a zmq context, and
`socket_timeouts` sets a time limit in that context. Waiting for a turn has a time limit too. Before a publish the first
rank asks the servers whether they are alive (`qarl.verl.ask_servers`).

verl puts the tensors of a bucket into a dict by name (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py),
so each record gets a number in its name (`qarl.rollout.remote.wire.numbered`).
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq

from qarl.errors import UserError
from qarl.rollout.publish.manifest import NamedTensor
from qarl.rollout.remote.host_turn import turn_on_host
from qarl.rollout.remote.records import TransferFailed
from qarl.rollout.remote.wire import DeltaSender, encode_publish, numbered
from qarl.verl.ask_servers import RESUME

TIMEOUT_VARIABLE = "QARL_PUBLISH_TIMEOUT"
DEFAULT_TIMEOUT = "120"
TURN_LIMITS = 10
"""A run waits for its turn up to this many times `publish_timeout`, which limits the wait for a single message."""
_TURN_LIMIT = f"the limit is {TURN_LIMITS} times {TIMEOUT_VARIABLE}"
RUN_VARIABLES = ("RAY_RAYLET_PID", "RAY_JOB_ID")


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


def reserved(stream: Generator[NamedTensor]) -> Generator[NamedTensor]:
    """Take this host's turn for `stream`, and set the time limits of the sockets. Return the stream.

    Both end when nothing refers to the stream any more. verl's sender has then cleaned up, whether it read the whole
    stream, a part of it or nothing. Raise UserError as `run_identity`, `publish_timeout` and `turn_on_host` do."""
    seconds = publish_timeout()
    with ExitStack() as stack:
        stack.enter_context(socket_timeouts(seconds))
        turn = turn_on_host(run_identity(), seconds=TURN_LIMITS * seconds, limit=_TURN_LIMIT)
        stack.enter_context(turn)
        weakref.finalize(stream, stack.pop_all().close)
    return stream


@dataclass(frozen=True)
class Publication:
    """A publish to rollout workers on other devices. `receivers`: the fingerprint that each receiver has, which must be
    there before the first tensor is read (`DeltaSender.stream`)."""

    stream: Generator[NamedTensor]
    receivers: list[str | None] = field(default_factory=list)

    def __iter__(self) -> Iterator[NamedTensor]:
        return self.stream


def encoded(tensors: Iterable[NamedTensor], version: int, **options: Any) -> Generator[NamedTensor]:
    """Return the stream of a publish of `tensors` as `version` by this run, for verl's buckets. `options`: those of
    `encode_publish`."""
    return numbered(encode_publish(tensors, version=version, run=run_identity(), **options))


def publication(
    tensors: Iterable[NamedTensor], version: int, outbox: DeltaSender | None = None
) -> Publication:
    """Return the publish of `tensors` as `version` by this run. With an `outbox`, only changes are sent, if all
    `receivers` of the publication have what it sent last."""
    if outbox is None:
        return Publication(encoded(tensors, version))
    receivers: list[str | None] = []
    stream = outbox.stream(tensors, version=version, receivers=receivers, run=run_identity())
    return Publication(numbered(stream), receivers)


def refuse_other_run(begin: Mapping[str, Any], *, run: str) -> None:
    """Raise TransferFailed if `begin`, the first record of a publish, is not of `run`."""
    sender = begin.get("run")
    if sender == run:
        return
    raise TransferFailed(
        "the engine was sent the weights of another run",
        where=f"sent by {sender or 'a run without a name'}, expected from {run} (host/Raylet/Ray job)",
        why="two runs on this host use one socket: verl names it by Ray's job id, which is the same in every "
        "Ray that a run starts for itself",
        fix="QaRL's runs wait for each other, so the other one is not QaRL's, or uses another version: end it, then "
        f"{RESUME}",
    )
