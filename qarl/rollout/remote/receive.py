"""The engine's side of a publish from another process, inside vLLM's worker. It reads the stream of
`qarl.rollout.remote.wire`, in any number of parts, and hands each unit to the engine's weights or to its adapter.

The receiver holds the tensors of only one unit (a decoder layer) in memory, and hands them on before it knows whether
their checksums are right: it compares all of them at the end, so that no unit waits for the device. After any error the
publish is over, and its target, which the first record names, is stale until the next complete publish.

If the sender asks for it, a copy of all published tensors is kept for deltas (`qarl.rollout.remote.delta`). After a
delta the unchanged tensors are written too, because an engine that slept may have lost them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from qarl.rollout.publish.adapters import EngineAdapter, takes_no_adapter
from qarl.rollout.publish.checksum import unit_checksums
from qarl.rollout.publish.manifest import Manifest, NamedTensor, TensorSpec, check_specs, unit_of
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.adapters import AdapterTarget
from qarl.rollout.remote.delta import PublishedCache, apply_changes_of
from qarl.rollout.remote.records import (
    BEGIN,
    COMMIT,
    UNIT,
    TransferFailed,
    check_digest,
    not_as_sent,
    read_record,
    without_number,
)

Record = Mapping[str, Any]


class Target(Protocol):
    """What a publish replaces."""

    @property
    def expected(self) -> Manifest:
        """The manifest of its tensors."""

    def begin(self, record: Record) -> None:
        """Become stale, and take the tensors that follow."""

    def write(self, unit: list[NamedTensor]) -> None:
        """Take a unit, whose names, dtypes and shapes are right. Its memory may be used again afterwards."""

    def missing(self, arrived: set[str]) -> list[str]:
        """Return the names of the tensors that must have arrived by the last record, and have not."""

    def commit(self, record: Record, digests: dict[str, int]) -> None:
        """End the publish. `digests`: the checksums of the tensors that were sent whole."""

    def fail(self, where: str, error: BaseException) -> None:
        """Stay stale, because `error` has ended the publish at `where`."""


class WeightTarget:
    """Writes units into `weights`, and keeps the published tensors if the sender asks for it."""

    def __init__(self, weights: EngineWeights) -> None:
        self.weights = weights
        self.cache: PublishedCache | None = None
        self._version = 0
        self._is_delta = False
        self._members: dict[str, list[str]] = {}

    @property
    def expected(self) -> Manifest:
        return self.weights.expected

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the kept tensors, or None if there are none, or if the weights may be others."""
        if self.cache is None or self.weights.in_doubt:
            return None
        return self.cache.fingerprint

    def begin(self, record: Record) -> None:
        base = record.get("base")
        here = self.fingerprint
        self._version = record["version"]
        self._is_delta = base is not None
        self.weights.begin(self._version)
        if self._is_delta and base != here:
            raise TransferFailed(
                f"the changes of version {self._version} do not apply to the tensors that the engine has kept",
                where=f"the changes are for {base}, but the engine has {here}",
                why="the engine was restarted, or an earlier publish was lost",
            )
        if not record.get("keep"):
            self.cache = None
            return
        if self.cache is None or here is None:
            self.cache = PublishedCache()
        self.cache.begin(changes=self._is_delta)

    def write(self, unit: list[NamedTensor]) -> None:
        self.weights.plan.write(dict(unit))
        if self.cache is not None and not self._is_delta:
            for name, tensor in unit:
                self.cache.put(name, tensor)

    def changed_unit(self, record: Record, sent: list[NamedTensor]) -> list[NamedTensor]:
        """Return all tensors of a unit, after the changes that were `sent` before its `record`.

        The checksums of all of them are compared, because a payload does not say which tensor it is for.

        Raises:
            TransferFailed: a tensor was lost or added on the way, or a payload is damaged.
        """
        assert self.cache is not None
        names = self._members_of(record["unit"])
        apply_changes_of(record, sent, names, self.cache)
        device = next(self.weights.model.parameters()).device
        whole = [(name, self.cache.tensors[name].to(device, non_blocking=True)) for name in names]
        if not whole:
            return []
        computed = unit_checksums([tensor for _, tensor in whole])[0].tolist()
        for name, digest in zip(names, computed, strict=True):
            check_digest(name, digest, self.cache.digests[name])
        return whole

    def _members_of(self, unit: str) -> list[str]:
        """Return the names of all tensors of `unit`."""
        if not self._members:
            for name in self.expected:
                self._members.setdefault(unit_of(name), []).append(name)
        return self._members.get(unit, [])

    def missing(self, arrived: set[str]) -> list[str]:
        return [name for name in self.expected if name not in arrived]

    def commit(self, record: Record, digests: dict[str, int]) -> None:
        if self.cache is not None:
            fingerprint = self.cache.commit(self._version, None if self._is_delta else digests)
            if fingerprint != record.get("fingerprint"):
                raise TransferFailed(
                    f"the engine's tensors differ from version {self._version} of the trainer's",
                    why="a tensor that was not sent has different checksums on the two sides",
                )
        self.weights.finish()

    def fail(self, where: str, error: BaseException) -> None:
        self.weights.fail(where, error)


class StreamReceiver:
    """Receives publishes for one worker of an engine, of its `weights` and of its `adapter`, if it can have one."""

    def __init__(
        self,
        weights: EngineWeights,
        adapter: EngineAdapter | None = None,
        *,
        clone: bool = False,
        check_begin: Callable[[Record], None] | None = None,
    ) -> None:
        """`clone`: whether the tensors of one `feed` are views of a buffer that the transport uses again for the next,
        as in verl. `check_begin`: raises if the first record is not that of a publish to this engine."""
        self.weights = weights
        self.adapter = adapter
        self.clone = clone
        self.check_begin = check_begin
        self._weights = WeightTarget(weights)
        self._adapter = AdapterTarget(adapter, weights) if adapter is not None else None
        self._target: Target = self._weights
        """That of the publish under way, or of the last one."""
        self._first: Record | None = None
        """The first record of the publish under way."""
        self._reset()

    def _reset(self) -> None:
        self._first = None
        self._unit: list[NamedTensor] = []
        self._arrived: set[str] = set()
        self._compare: list[tuple[list[str], torch.Tensor]] = []
        """Names of tensors, and their checksums here and at the sender: int64 [2, names]."""

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the cached tensors, or None. A delta publish must contain this fingerprint."""
        return self._weights.fingerprint

    @property
    def stale(self) -> bool:
        """Whether the engine must not generate: it has no weights, or no adapter where it can have one."""
        return self.weights.stale or (self.adapter is not None and self.adapter.version is None)

    @property
    def stale_because(self) -> str:
        if self.adapter is None or self.weights.stale:
            return self.weights.stale_because
        return self.adapter.stale_because

    def mark_stale(self, reason: str, *, doubt: bool = True) -> None:
        """Make what the engine generates with stale, with `reason`: its adapter, if it can have one, or its weights.

        `doubt`: whether the next publish of weights must contain all tensors."""
        if self.adapter is not None:
            self.adapter.mark_stale(reason)
        else:
            self.weights.mark_stale(reason, doubt=doubt)

    def feed(self, stream: Iterable[NamedTensor]) -> None:
        """Take the next tensors and records. The transport may split a publish into any number of calls, and put
        several publishes into one.

        Raises:
            UserError: the tensors do not fit the engine's model, or it has no place for an adapter.
            TransferFailed: the tensors did not arrive as they were sent.
            ReloadFailed: vLLM failed while loading, in this publish or earlier. The engine is broken.
        """
        last = "its first record"
        try:
            for numbered_name, tensor in stream:
                name = without_number(numbered_name)
                last = name
                self._take(name, tensor)
            if self.clone:
                self._unit = [(name, tensor.clone()) for name, tensor in self._unit]
        except BaseException as error:
            self._reset()
            self._target.fail(f"at {last}", error)
            raise

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name == BEGIN:
            self._begin(read_record(name, tensor))
        elif self._first is None:
            raise TransferFailed(
                f"{name} arrived outside of a publish",
                why=f"a publish must start with the record {BEGIN}",
            )
        elif name == UNIT and self._first.get("base") is not None:
            self._end_changes(read_record(name, tensor))
        elif name == UNIT:
            self._end_unit(tensor)
        elif name == COMMIT:
            self._commit(self._first, read_record(name, tensor))
        else:
            self._unit.append((name, tensor))

    def _begin(self, record: Record) -> None:
        if self.check_begin is not None:
            self.check_begin(record)
        self._reset()
        self._target = self._target_of(record)
        self._target.begin(record)
        self._first = record

    def _target_of(self, record: Record) -> Target:
        if "adapter" not in record:
            if self.adapter is not None:
                self.adapter.base_changes()
            return self._weights
        if self._adapter is None:
            fix = "leave actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora to QaRL"
            raise takes_no_adapter("it was started without adapters", fix)
        return self._adapter

    def _end_unit(self, digests: torch.Tensor) -> None:
        """Hand on a unit. `digests`: its checksums, which `_commit` compares with those computed here."""
        names = [name for name, _ in self._unit]
        if not names or digests.dtype != torch.int64 or digests.shape != (len(names),):
            unit = unit_of(names[0]) if names else "a unit"
            sent = [name for name in self._target.expected if unit_of(name) == unit]
            raise not_as_sent(unit, names, sent)
        computed = unit_checksums([tensor for _, tensor in self._unit])[0]
        both = torch.stack((computed, digests.to(computed.device, non_blocking=True)))
        self._compare.append((names, both))
        self._write(self._unit)

    def _end_changes(self, record: Record) -> None:
        """Apply the changes of a unit, and hand it on whole."""
        changed = self._weights.changed_unit(record, self._unit)
        self._write(changed)

    def _write(self, unit: list[NamedTensor]) -> None:
        """Hand on a unit, unless one of its tensors has come before, or does not fit the engine."""
        doubled = [name for name, _ in unit if name in self._arrived]
        if doubled:
            raise TransferFailed(
                f"{unit_of(doubled[0])} arrived twice",
                where=", ".join(doubled[:4]),
                why="the transport delivered the same tensors again",
            )
        expected = self._target.expected
        known = {name: expected[name] for name, _ in unit if name in expected}
        check_specs([(name, TensorSpec.of(tensor)) for name, tensor in unit], known)
        self._target.write(unit)
        self._arrived.update(name for name, _ in unit)
        self._unit = []

    def _commit(self, first: Record, last: Record) -> None:
        version = first["version"]
        missing = self._target.missing(self._arrived)
        if missing or self._unit or int(last["version"]) != version:
            where = f"the last record has version {last['version']}"
            if missing:
                where = f"missing: {', '.join(missing[:8])}"
            raise TransferFailed(f"the publish of version {version} is not complete", where=where)
        self._target.commit(last, self._compared())
        self._reset()

    def _compared(self) -> dict[str, int]:
        """Return the checksums of all units that were sent whole. Raise TransferFailed if one is not that sent."""
        if not self._compare:
            return {}
        names = [name for names, _ in self._compare for name in names]
        computed, sent = torch.cat([both for _, both in self._compare], 1).tolist()
        for name, here, there in zip(names, computed, sent, strict=True):
            check_digest(name, here, there)
        return dict(zip(names, computed, strict=True))


class Inbox:
    """Takes the buckets of a transport that must be read to its end, also after an error. Otherwise the sender would
    wait for the acknowledgement of its next bucket until its time limit.

    It feeds `receiver` until the first error, `failure`. Later buckets are dropped."""

    def __init__(self) -> None:
        self.receiver: StreamReceiver | None = None
        self.failure: BaseException | None = None

    @contextmanager
    def keeping_failure(self) -> Iterator[None]:
        """Return a context that ends with its first error, which becomes `failure` and is not raised."""
        try:
            yield
        except BaseException as error:
            _traceback_as_text(error)
            self.failure = error

    def take(self, bucket: Iterable[NamedTensor], is_last: bool) -> None:
        """Take a bucket, whose memory may be used again afterwards."""
        if self.failure is not None or self.receiver is None:
            return
        with self.keeping_failure():
            self.receiver.feed(bucket)

    def close(self) -> None:
        """Raise `failure`, or RuntimeError if the engine has no complete publish after the last bucket."""
        if self.failure is not None:
            raise self.failure
        if self.receiver is not None and self.receiver.stale:
            raise RuntimeError(self.receiver.stale_because)


def _traceback_as_text(error: BaseException) -> None:
    """Replace the traceback of `error` with a note. Variables in its frames would keep the bucket alive, so the
    transport could not close its shared memory."""
    error.add_note("".join(traceback.format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
