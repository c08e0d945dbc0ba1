"""The engine's weights as the target of a stream (`qarl.rollout.remote.receive`), and the tensors kept for deltas.

If the sender asks for it, a copy of all published tensors is kept (`qarl.rollout.remote.delta`). After a delta the
unchanged tensors are written too, because an engine that slept may have lost them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qarl.rollout.publish.checksum import unit_checksums
from qarl.rollout.publish.manifest import Manifest, NamedTensor, unit_of
from qarl.rollout.publish.transaction import EngineWeights
from qarl.rollout.remote.delta import PublishedCache
from qarl.rollout.remote.records import TransferFailed, check_digest, not_as_sent

Record = Mapping[str, Any]


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


def apply_changes_of(
    unit: Record, sent: list[NamedTensor], members: Collection[str], cache: PublishedCache
) -> None:
    """Apply to `cache` the tensors that `qarl.rollout.remote.wire.send_changes` has yielded before its record, `unit`.

    `members`: names of all tensors of the unit.

    Raises:
        TransferFailed: a tensor was lost or added on the way, or a payload is damaged.
    """
    names = [name for name, _ in sent]
    digests = unit["digests"]
    if names != list(digests):
        raise not_as_sent(unit["unit"], names, list(digests))
    for name, tensor in sent:
        try:
            if name not in members:
                raise ValueError(f"it is not a tensor of {unit['unit']}")
            cache.take(name, tensor, digests[name], is_delta=name in unit["deltas"])
        except ValueError as error:
            raise TransferFailed(
                f"the changes of {name} cannot be applied", why=str(error)
            ) from error
