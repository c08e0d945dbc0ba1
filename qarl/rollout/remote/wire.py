"""The wire format of a publish to engines in other processes: tensors in layer order, with records between them.

    qarl.begin    the version, and for an adapter its rank, alpha and targets
    tensors       the tensors of one unit: a decoder layer, or a module outside the decoder layers
    qarl.unit     the checksums of the unit's tensors, int64, in their order
    ...           more units
    qarl.commit   the version again; only now is the publish complete

Records are tensors too (all but `qarl.unit` are JSON in uint8). So any transport that keeps the order of named tensors
can carry them, for example verl's buckets. `encode_publish` makes the stream, and `qarl.rollout.remote.receive` reads
it. Both sides hold one unit in memory at a time. A unit contains all parts of a layer that the engine fuses (q/k/v,
gate/up), and its experts as stacks (`qarl.quant.experts`). Between the first record and the last, neither side waits
for its device: both read checksums, and whether there is NaN or Inf, before the last record.

A delta publish changes the tensors of the previous publish (`qarl.rollout.remote.delta`). `qarl.begin` then contains
the fingerprint of that publish, `base`. A unit contains only changed tensors. `qarl.unit` is JSON then, with the
checksums by name. It lists under `deltas` the tensors that are sent as payloads. Checksums are always of whole tensors.
Both sides then read results once for each unit, and again for each tensor that has changed.

`DeltaSender` keeps the tensors that it sent last, as the receivers do, but does not assume that they arrived. Before
each publish it gets the fingerprints of all receivers. If they all equal its own, it sends only changes. Otherwise it
sends all tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from qarl.errors import UserError
from qarl.rollout.publish.checksum import unit_checksums
from qarl.rollout.publish.manifest import NamedTensor, unit_of
from qarl.rollout.publish.version import checked_version
from qarl.rollout.remote.delta import PublishedCache, Tally, find_changes
from qarl.rollout.remote.records import BEGIN, COMMIT, UNIT, is_record, record


def refuse_nonfinite(names: Sequence[str], flags: Sequence[int]) -> None:
    """Raise UserError if a flag of `qarl.rollout.publish.checksum.unit_checksums` says NaN or Inf."""
    bad = [name for name, flag in zip(names, flags, strict=False) if flag]
    if not bad:
        return
    raise UserError(
        f"{len(bad)} tensors to publish hold NaN or Inf",
        where=", ".join(bad[:8]),
        why="the engine would return NaN, and its KV cache would keep the NaN",
        fix="lower optim.lr or actor.grad_clip, or check what the last update did to these weights",
    )


def encode_publish(
    tensors: Iterable[NamedTensor],
    *,
    version: int,
    run: str | None = None,
    adapter: Mapping[str, Any] | None = None,
    cache: PublishedCache | None = None,
    is_delta: bool = False,
    tally: Tally | None = None,
) -> Iterator[NamedTensor]:
    """Yield `tensors` (in layer order, experts in stacks) with the records of a publish between them.

    Args:
        run: the name of the run that owns the weights, for transports that two runs could share by mistake.
        adapter: what `qarl.lora.adapter.Adapter` has beside its tensors, if the tensors are those of an adapter.
        cache: the tensors of the last publish, which follow the stream. The receivers cache the tensors too, so that
            the next publish can be a delta.
        is_delta: whether the receivers have what is in `cache`, so that only changes are sent.
        tally: counts the changed words of a delta.

    Raises:
        UserError: the version is none, or a tensor contains NaN or Inf. The message names the tensor. That is raised
            after the last tensor, because other ranks gather each tensor together with this one.
    """
    version = checked_version(version)
    begin: dict[str, Any] = {"version": version}
    if run is not None:
        begin["run"] = run
    if adapter is not None:
        begin["adapter"] = adapter
    tally = tally or Tally()
    units = list[tuple[list[str], torch.Tensor]]()
    tally.known = is_delta
    if cache is not None:
        begin |= {"keep": True, "base": cache.fingerprint if is_delta else None}
        cache.begin(changes=is_delta)
    yield record(BEGIN, begin)
    for unit, group in groupby(tensors, key=lambda item: unit_of(item[0])):
        members = list(group)
        results = unit_checksums([tensor for _, tensor in members], finite=True)
        units.append(([name for name, _ in members], results))
        if cache is not None and is_delta:
            yield from send_changes(unit, members, results, cache, tally)
            continue
        yield from members
        if cache is not None:
            for name, tensor in members:
                cache.put(name, tensor)
        yield UNIT, results[0]
    names = [name for names, _ in units for name in names]
    sums, bad = torch.cat([results for _, results in units], 1).tolist() if units else ([], [])
    refuse_nonfinite(names, bad)
    commit: dict[str, Any] = {"version": version}
    if cache is not None:
        commit["fingerprint"] = cache.commit(version, dict(zip(names, sums, strict=True)))
    yield record(COMMIT, commit)


def send_changes(
    unit: str,
    members: list[NamedTensor],
    results: torch.Tensor,
    cache: PublishedCache,
    tally: Tally,
) -> Iterator[NamedTensor]:
    """Yield the changed tensors of a unit, and its record, which `receive_changes` takes at the other end.

    `results`: those of `unit_checksums` for `members`. Other arguments are as in `encode_publish`."""
    compared = [cache.compare(name, tensor) for name, tensor in members]
    none = results.new_zeros(())
    counts = [
        none if pair is None else pair.count.to(results.device, non_blocking=True)
        for pair in compared
    ]
    sums, _, differing = torch.cat(
        (results, torch.stack(counts)[None])
    ).tolist()  # the host waits once
    digests: dict[str, int] = {}
    deltas: list[str] = []
    for (name, tensor), comparison, digest, count in zip(
        members, compared, sums, differing, strict=True
    ):
        if comparison is not None:
            changed, payload = find_changes(comparison, count)
            tally.add(name, tensor, changed)
            if not changed:
                continue
            if payload is not None:
                tensor = payload
                deltas.append(name)
        digests[name] = digest
        cache.take(name, tensor, digest, is_delta=name in deltas)
        yield name, tensor
    yield record(UNIT, {"unit": unit, "digests": digests, "deltas": deltas})


def numbered(stream: Iterable[NamedTensor]) -> Generator[NamedTensor]:
    """Yield the stream of a publish with unique names of its records, for example `qarl.unit#7`."""
    numbers = itertools.count()
    for name, tensor in stream:
        yield (f"{name}#{next(numbers)}" if is_record(name) else name), tensor


class DeltaSender:
    """The last publish of one sender. `cache`: its tensors. `tally`: counts of bytes and changed words."""

    def __init__(self) -> None:
        self.cache = PublishedCache()
        self.tally = Tally()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last publish: `publish/delta`, `publish/mbytes`, and counts of changed words."""
        if not self.tally.bytes:
            return {}
        sent = {"publish/delta": float(self.tally.known), "publish/mbytes": self.tally.bytes / 1e6}
        return sent | self.tally.metrics()

    def stream(
        self,
        tensors: Iterable[NamedTensor],
        *,
        version: int,
        receivers: Collection[str | None],
        **options: Any,
    ) -> Iterator[NamedTensor]:
        """Yield the stream of a publish, as `encode_publish` does with `options`.

        `receivers`: the fingerprint of each receiver, or None for a receiver without a fingerprint."""
        sender = self.cache.fingerprint
        same = (
            sender is not None
            and bool(receivers)
            and all(receiver == sender for receiver in receivers)
        )
        self.tally = Tally()
        encoded = encode_publish(
            tensors, version=version, cache=self.cache, is_delta=same, tally=self.tally, **options
        )
        yield from self.tally.count(encoded)
