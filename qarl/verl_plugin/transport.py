"""A publish through verl's buckets.

verl puts the tensors of a bucket into a dict by name (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py),
and the records of `qarl.rollout.wire` repeat theirs: so each gets a number on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from qarl.rollout.wire import NamedTensor, encode_publish, is_record


def encode(tensors: Iterable[NamedTensor], *, version: int) -> Iterator[NamedTensor]:
    """The stream of a publish, every name once."""
    numbers = count()
    for name, tensor in encode_publish(tensors, version=version):
        yield (f"{name}#{next(numbers)}" if is_record(name) else name), tensor


def decode(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Undo `encode`'s renaming."""
    for name, tensor in tensors:
        plain, _, number = name.rpartition("#")
        yield (plain if number.isdecimal() and is_record(plain) else name), tensor
