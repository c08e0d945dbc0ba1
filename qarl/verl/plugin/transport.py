"""Encodes a publish for verl's buckets.

verl puts the tensors of a bucket into a dict by name (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py),
but several records of `qarl.rollout.publish.wire` have the same name. So each record gets a number in its name while it
is sent. The first record names the run. With an `DeltaSender`, only changes are sent, if all engines hold what it sent
last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import count

import torch

from qarl.rollout.publish.send import DeltaSender, encode_publish
from qarl.rollout.publish.wire import BEGIN, NamedTensor, TransferFailed, is_record, read_record


def encode(
    tensors: Iterable[NamedTensor],
    *,
    version: int,
    run: str,
    outbox: DeltaSender | None = None,
    held: Collection[str | None] = (),
) -> Iterator[NamedTensor]:
    """Yield the stream of a publish by the run `run`. All records in it have unique names.

    `held`: what the engines hold (see `DeltaSender.stream`). It is read when the stream begins."""
    numbers = count()
    if outbox is None:
        stream = encode_publish(tensors, version=version, run=run)
    else:
        stream = outbox.stream(tensors, version=version, held=held, run=run)
    for name, tensor in stream:
        yield (f"{name}#{next(numbers)}" if is_record(name) else name), tensor


def decode(tensors: Iterable[NamedTensor], *, run: str) -> Iterator[NamedTensor]:
    """Undo the renaming of `encode`. Raise `TransferFailed` if a publish of a different run begins."""
    for name, tensor in tensors:
        plain, _, number = name.rpartition("#")
        name = plain if number.isdecimal() and is_record(plain) else name
        if name == BEGIN:
            check_run(tensor, run)
        yield name, tensor


def check_run(record: torch.Tensor, run: str) -> None:
    """Raise `TransferFailed` unless `record` names `run`. `record`: the first record of a publish."""
    sender = read_record(BEGIN, record).get("run")
    if sender != run:
        raise TransferFailed(
            "the engine was sent the weights of another run",
            where=f"sent by {sender or 'a run without a name'}, expected from {run} (host/Raylet/Ray job)",
            why="two runs on this host use one socket: verl names it by Ray's job id, which is the same in every Ray "
            "that a run starts for itself",
            fix="run the same command again: it resumes from the last checkpoint. Runs of QaRL wait for each other, "
            "so the other run is not one of QaRL, or uses another version, or /tmp is not writable",
        )
