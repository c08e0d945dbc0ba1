"""The engine's side of a publish, inside vLLM's worker. It checks and then writes the tensors, one unit at a time.

A publish is a transaction. From its begin to its end the receiver is `stale`. If the publish fails, for example because
a tensor is missing or damaged, or because vLLM refuses it, the receiver stays stale. A stale engine must not generate,
because it may have weights of two versions. The next complete publish repairs it. After `ReloadFailed` the receiver is
`broken`, and the engine must be replaced.

A trainer in the same process calls `write_all` with all tensors, which it has checked. Nothing travels, so there is
nothing to damage. A trainer in another process sends a stream (`qarl.rollout.remote.wire`), which `feed` takes in any
number of parts, from the record `qarl.begin` to `qarl.commit`.

Of a stream, the receiver holds the tensors of only one unit (a decoder layer) in memory, and writes them before it
knows whether their checksums are right: it compares all of them at the end, so that no unit waits for the device. Set
`clone=True` if the tensors of one `feed` are views of a buffer that the transport reuses for the next one, as in verl.
If the sender requests it, the receiver also keeps a copy of all tensors for delta publishes
(`qarl.rollout.remote.delta`). After a delta, the receiver also writes unchanged tensors, because an engine that slept
may have lost them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from qarl.rollout.publish import graph_addresses
from qarl.rollout.publish.checksum import unit_checksums
from qarl.rollout.publish.manifest import Manifest, NamedTensor, TensorSpec, check_specs, unit_of
from qarl.rollout.publish.version import checked_version, note_older
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved, WritePlan, refresh_tied_layers
from qarl.rollout.remote import wire
from qarl.rollout.remote.delta import PublishedCache
from qarl.vllm_versions import kv_cache_tensors


class WeightReceiver:
    """Receive publishes for one worker of the engine. Each worker has one receiver for its whole life.

    version         the version of the last complete publish, or None while the engine is stale
    stale_because   why the engine is stale
    broken          whether the engine must be replaced
    seconds         seconds of the last publish in `transfer` (taking and checking tensors) and `apply` (writing them)
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        expected: Manifest,
        *,
        kv_caches: Callable[[], Iterable[torch.Tensor]],
        clone: bool = False,
        direct: bool = True,
    ) -> None:
        """`expected`: the manifest, built from the engine's own config. `kv_caches`: a function that returns vLLM's KV
        caches. They are set to zero if the engine has returned NaN. `direct`: write directly into vLLM's storage if
        possible, not through its reload."""
        self.model = model
        self.expected = expected
        self.plan = WritePlan(model, vllm_config, expected, direct=direct)
        self.kv_caches = kv_caches
        self.clone = clone
        self.version: int | None = None
        self.stale_because: str = "nothing has been published to it yet"
        self.broken = False
        self.kv_cache_spoilt = False
        self.seconds = {"transfer": 0.0, "apply": 0.0}
        self.cache: PublishedCache | None = None
        self._is_delta = False
        self._units: dict[str, list[str]] = {}
        for name in expected:
            self._units.setdefault(unit_of(name), []).append(name)
        self._applied = 0.0
        self._open: int | None = None
        self._checks_addresses = graph_addresses.graphs_captured(vllm_config)
        self._places: dict[str, graph_addresses.Place] = {}
        self._seen: set[str] = set()
        self._unit: list[NamedTensor] = []
        self._compare: list[tuple[list[str], torch.Tensor]] = []
        """Names of tensors, and their checksums here and at the sender: int64 [2, names]."""

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the published weights that a trainer in this process may share, as views of the engine's memory
        (`qarl.rollout.publish.cpu_layers`). Nothing may write to them."""
        return self.plan.storage(self.expected)

    @classmethod
    def of_runner(cls, runner: Any, expected: Manifest, **options: bool) -> WeightReceiver:
        """Return the receiver for the model of `runner`, one worker's model runner. `options`: as in `__init__`."""
        return cls(
            runner.get_model(),
            runner.vllm_config,
            expected,
            kv_caches=lambda: kv_cache_tensors(runner.kv_caches),
            **options,
        )

    @property
    def stale(self) -> bool:
        return self.version is None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the cached tensors, or None. A delta publish must contain this fingerprint."""
        return self.cache.fingerprint if self.cache else None

    def mark_stale(self, reason: str, *, doubt: bool = True) -> None:
        """Make the receiver stale, with `reason`, until the next complete publish.

        `doubt`: whether the next publish must contain all tensors."""
        self.version = None
        self.stale_because = reason
        if doubt:
            self.cache = None

    def write_all(self, tensors: Sequence[NamedTensor], *, version: int) -> None:
        """Write all tensors of the manifest, in layer order and with experts as stacks, as `version`.

        After any exception the engine is stale. Raise ReloadFailed if vLLM failed, now or earlier."""
        start = time.perf_counter()
        try:
            self._open_version(version)
            self.cache = None
            for _, unit in groupby(tensors, key=lambda item: unit_of(item[0])):
                self.plan.write(dict(unit))
            self._finish()
        except BaseException as error:
            self._fail("while its tensors were written", error)
            raise
        finally:
            self.seconds = {"apply": time.perf_counter() - start}

    def feed(self, weights: Iterable[NamedTensor]) -> None:
        """Take the next tensors and records of a publish. The transport may split a publish into any number of calls.

        After any exception the publish is over and the engine is stale.

        Raises:
            UserError: the tensors do not fit the engine's model.
            TransferFailed: the tensors did not arrive as they were sent.
            ReloadFailed: vLLM failed while loading, in this publish or earlier. The engine is broken.
        """
        last = "its first record"
        start = time.perf_counter()
        applied = self._applied
        try:
            for name, tensor in weights:
                last = name
                self._take(name, tensor)
            if self.clone:
                self._unit = [(name, tensor.clone()) for name, tensor in self._unit]
        except BaseException as error:
            self._fail(f"at {last}", error)
            raise
        finally:
            self.seconds["apply"] += self._applied - applied
            self.seconds["transfer"] += time.perf_counter() - start - (self._applied - applied)

    def abort(self, reason: str) -> None:
        """End a publish that cannot be completed. The receiver stays stale."""
        version = "a publish" if self._open is None else f"the publish of version {self._open}"
        self.mark_stale(f"{version} did not complete: {reason}")
        self._open, self._unit, self._seen, self._compare = None, [], set(), []

    def _fail(self, where: str, error: BaseException) -> None:
        if not self.broken:
            self.abort(f"{where}: {getattr(error, 'what', error)}")
            self.broken = isinstance(error, ReloadFailed)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name == wire.BEGIN:
            self._begin(wire.read_record(name, tensor))
        elif self._open is None:
            raise wire.TransferFailed(
                f"{name} arrived outside of a publish",
                why=f"a publish must start with the record {wire.BEGIN}",
            )
        elif name == wire.UNIT:
            if self._is_delta:
                self._end_changes(wire.read_record(name, tensor))
            else:
                self._end_unit(tensor)
        elif name == wire.COMMIT:
            self._commit(wire.read_record(name, tensor))
        else:
            self._unit.append((name, tensor))

    def _open_version(self, version: int) -> None:
        if self.broken:
            raise ReloadFailed(
                "this engine is broken and takes no more publishes", why=self.stale_because
            )
        version = checked_version(version)
        note_older(version, self.version)
        self._open, self._seen, self._unit, self._compare = version, set(), [], []
        self.seconds = {"transfer": 0.0, "apply": 0.0}
        self.mark_stale(f"the publish of version {version} did not complete", doubt=False)
        if (
            self._checks_addresses and not self._places
        ):  # else a publish was aborted: its moves count too
            self._places = graph_addresses.places({"model": self.model})

    def _begin(self, record: dict[str, Any]) -> None:
        base = record.get("base")
        self._open_version(record["version"])
        self._is_delta = base is not None
        if self._is_delta and base != self.fingerprint:
            raise wire.TransferFailed(
                f"the changes of version {self._open} do not apply to the tensors that the engine has kept",
                where=f"the changes are for {base}, but the engine has {self.fingerprint}",
                why="the engine was restarted, or an earlier publish was lost",
            )
        if record.get("keep"):
            self.cache = self.cache or PublishedCache()
            self.cache.begin(changes=self._is_delta)
        else:
            self.cache = None

    def _end_unit(self, digests: torch.Tensor) -> None:
        """Write a unit. `digests`: its checksums, which `_commit` compares with those computed here."""
        names = [name for name, _ in self._unit]
        if not names or digests.dtype != torch.int64 or digests.shape != (len(names),):
            unit = unit_of(names[0]) if names else "a unit"
            raise wire.not_as_sent(unit, names, self._units.get(unit, []))
        computed = unit_checksums([tensor for _, tensor in self._unit])[0]
        self._compare.append(
            (names, torch.stack((computed, digests.to(computed.device, non_blocking=True))))
        )
        self._check_new(self._unit)
        self._write(dict(self._unit))
        if self.cache:
            for name, tensor in self._unit:
                self.cache.put(name, tensor)
        self._unit = []

    def _end_changes(self, record: dict[str, Any]) -> None:
        """Apply the changes of a unit, and write it."""
        assert self.cache is not None
        members = self._units.get(record["unit"], [])
        wire.receive_changes(record, self._unit, members, self.cache)
        device = next(self.model.parameters()).device
        whole = [(name, self.cache.tensors[name].to(device, non_blocking=True)) for name in members]
        self._check_new(whole)
        computed = unit_checksums([tensor for _, tensor in whole])[0].tolist() if whole else []
        for (name, _), digest in zip(whole, computed, strict=True):
            check_digest(name, digest, self.cache.digests[name])
        self._write(dict(whole))
        self._unit = []

    def _check_new(self, whole: list[NamedTensor]) -> None:
        """Raise if a tensor of a unit has come before, or does not fit the engine."""
        if doubled := [name for name, _ in whole if name in self._seen]:
            raise wire.TransferFailed(
                f"{unit_of(doubled[0])} arrived twice",
                where=", ".join(doubled[:4]),
                why="the transport delivered the same tensors again",
            )
        known = {name: self.expected[name] for name, _ in whole if name in self.expected}
        check_specs([(name, TensorSpec.of(tensor)) for name, tensor in whole], known)
        self._seen.update(name for name, _ in whole)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        start = time.perf_counter()
        self.plan.write(tensors)
        self._applied += time.perf_counter() - start

    def _commit(self, record: dict[str, Any]) -> None:
        missing = [name for name in self.expected if name not in self._seen]
        if missing or self._unit or int(record["version"]) != self._open:
            raise wire.TransferFailed(
                f"the publish of version {self._open} is not complete",
                where=f"missing: {', '.join(missing[:8])}"
                if missing
                else f"the last record has version {record['version']}",
            )
        digests = self._compare_digests()
        fingerprint = self.cache and self.cache.commit(
            self._open, None if self._is_delta else digests
        )
        if self.cache and fingerprint != record.get("fingerprint"):
            raise wire.TransferFailed(
                f"the engine's tensors differ from version {self._open} of the trainer's",
                why="a tensor that was not sent has different checksums on the two sides",
            )
        start = time.perf_counter()
        self._finish()
        self._applied += time.perf_counter() - start

    def _finish(self) -> None:
        """Finish a complete publish."""
        refresh_tied_layers(self.model)
        self._check_addresses()
        if self.kv_cache_spoilt:
            # Attention multiplies masked positions by zero, and NaN times zero is NaN.
            for cache in self.kv_caches():
                cache.zero_()
            self.kv_cache_spoilt = False
        self.version = self._open
        self._open = None

    def _compare_digests(self) -> dict[str, int]:
        """Return the checksums of all units that were sent whole. Raise TransferFailed if one is not that sent."""
        if not self._compare:
            return {}
        names = [name for names, _ in self._compare for name in names]
        computed, sent = torch.cat([both for _, both in self._compare], 1).tolist()
        for name, mine, theirs in zip(names, computed, sent, strict=True):
            check_digest(name, mine, theirs)
        return dict(zip(names, computed, strict=True))

    def _check_addresses(self) -> None:
        """Raise TensorsMoved if a publish has moved a tensor that one of vLLM's CUDA graphs can have captured."""
        if not self._checks_addresses:
            return
        before = self._places
        self._places = {}
        if lost := graph_addresses.moved(before, graph_addresses.places({"model": self.model})):
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise TensorsMoved(
                f"the publish of version {self._open} moved {len(lost)} tensors that CUDA graphs have captured",
                why=f"the graphs would use memory that was freed: {shown}. A new engine has the same fault with these "
                "layers",
            )


def check_digest(name: str, computed: int, sent: int) -> None:
    """Raise TransferFailed if the checksum of a tensor is not that sent."""
    if computed != sent:
        raise wire.TransferFailed(
            f"{name} was damaged on the way to the engine",
            where=f"checksum {computed & (2**64 - 1):016x}, sent as {sent & (2**64 - 1):016x}",
            why="the engine did not receive the bytes that the trainer's forward used",
            fix=f"{wire.RETRY}; if the error comes back, check the memory of this machine",
        )
