"""The engine's side of a publish, inside vLLM's worker. It checks and then writes the tensors, one unit at a time.

A publish is a transaction. From its first record (`qarl.begin`) to its last (`qarl.commit`) the receiver is `stale`. If
the publish fails, for example because a tensor is missing or damaged, or because vLLM refuses it, the receiver stays
stale. A stale engine must not generate, because it may have weights of two versions. The next complete publish repairs
it. After `ReloadFailed` the receiver is `broken`, and the engine must be replaced.

The receiver holds the tensors of only one unit (a decoder layer) in memory. Set `clone=True` if these tensors are views
of a buffer that the transport reuses, as in verl. If the sender requests it, the receiver also keeps a copy of all
tensors for delta publishes (`qarl.rollout.publish.kept`).

After a delta, the receiver also writes unchanged tensors, because an engine that slept may have lost them. Set
`skip_unchanged=True` if only publishes change the engine's weights. Then unchanged modules are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.rollout.publish import captured, wire
from qarl.rollout.publish.checksum import checksums
from qarl.rollout.publish.kept import KeptTensors
from qarl.rollout.publish.manifest import Manifest, TensorSpec, check_specs
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved, WritePlan, refresh_tied_layers
from qarl.vllm_versions.differences import kv_cache_tensors


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
        skip_unchanged: bool = False,
    ) -> None:
        """`expected`: the manifest, built from the engine's own config. `kv_caches`: a function that returns vLLM's KV
        caches. They are set to zero if the engine has returned NaN. `direct`: write directly into vLLM's storage if
        possible, not through its reload."""
        self.model, self.expected = model, expected
        self.plan = WritePlan(model, vllm_config, expected, direct=direct)
        self.kv_caches, self.clone = kv_caches, clone
        self.version: int | None = None
        self.stale_because: str = "nothing has been published to it yet"
        self.broken = False
        self.kv_cache_spoilt = False
        self.seconds = {"transfer": 0.0, "apply": 0.0}
        self.skip_unchanged = skip_unchanged
        self.kept: KeptTensors | None = None
        self._is_delta = False
        self._units: dict[str, list[str]] = {}
        for name in expected:
            self._units.setdefault(wire.unit_of(name), []).append(name)
        self._applied = 0.0
        self._open: int | None = None
        self._checks_addresses = captured.graphs_captured(vllm_config)
        self._places: dict[str, captured.Place] = {}
        self._seen: set[str] = set()
        self._unit: list[wire.NamedTensor] = []

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
    def held(self) -> str | None:
        """The fingerprint of the kept tensors, or None. A delta publish must contain this fingerprint."""
        return self.kept.fingerprint if self.kept else None

    def mark_stale(self, reason: str, *, doubt: bool = True) -> None:
        """Make the receiver stale, with `reason`, until the next complete publish.

        `doubt`: whether the next publish must contain all tensors."""
        self.version, self.stale_because = None, reason
        if doubt:
            self.kept = None

    def feed(self, weights: Iterable[wire.NamedTensor]) -> None:
        """Take the next tensors and records of a publish. The transport may split a publish into any number of calls.

        After any exception the publish is over and the engine is stale.

        Raises:
            UserError: the tensors do not fit the engine's model.
            TransferFailed: the tensors did not arrive as they were sent.
            ReloadFailed: vLLM failed while loading, in this publish or earlier. The engine is broken.
        """
        last = "its first record"
        start, applied = time.perf_counter(), self._applied
        try:
            for name, tensor in weights:
                last = name
                self._take(name, tensor)
        except BaseException as error:
            if not self.broken:
                self.abort(f"at {last}: {_in_one_line(error)}")
                self.broken = isinstance(error, ReloadFailed)
            raise
        finally:
            self.seconds["apply"] += self._applied - applied
            self.seconds["transfer"] += time.perf_counter() - start - (self._applied - applied)

    def abort(self, reason: str) -> None:
        """End a publish that cannot be completed. The receiver stays stale."""
        version = "a publish" if self._open is None else f"the publish of version {self._open}"
        self.mark_stale(f"{version} did not complete: {reason}")
        self._open, self._unit, self._seen = None, [], set()

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if name == wire.BEGIN:
            self._begin(wire.read_record(name, tensor))
        elif self._open is None:
            raise wire.TransferFailed(
                f"{name} arrived outside of a publish",
                why=f"a publish must start with the record {wire.BEGIN}",
                fix="send everything that qarl.rollout.publish.wire.encode_publish yields, in order",
            )
        elif name == wire.UNIT:
            self._write_unit(wire.read_record(name, tensor))
        elif name == wire.COMMIT:
            self._commit(wire.read_record(name, tensor))
        elif wire.is_record(name):
            raise UserError(
                f"the engine does not know the message {name} of this publish",
                fix="use the same version of QaRL on both sides",
            )
        else:
            self._unit.append((name, tensor.clone() if self.clone else tensor))

    def _begin(self, record: dict[str, Any]) -> None:
        if self.broken:
            raise ReloadFailed("this engine is broken and takes no more publishes", why=self.stale_because)
        base, held = record.get("base"), self.held
        self._open, self._seen, self._unit = int(record["version"]), set(), []
        self.seconds = {"transfer": 0.0, "apply": 0.0}
        self.mark_stale(f"the publish of version {self._open} did not complete", doubt=False)
        self._is_delta = base is not None
        if self._is_delta and base != held:
            raise wire.TransferFailed(
                f"the changes of version {self._open} do not apply to the tensors that the engine has kept",
                where=f"the changes are for {base}, but the engine has {held}",
                why="the engine was restarted, or an earlier publish was lost",
                fix=wire.RETRY,
            )
        if record.get("keep"):
            self.kept = self.kept or KeptTensors()
            self.kept.begin(changes=self._is_delta)
        else:
            self.kept = None
        if self._checks_addresses and not self._places:  # else a publish was aborted: its moves count too
            self._places = captured.places({"model": self.model})
        announced = wire.read_specs(record["tensors"])
        if announced is not None:
            check_specs(announced.items(), self.expected)

    def _write_unit(self, record: dict[str, Any]) -> None:
        names, digests = [name for name, _ in self._unit], record["digests"]
        if names != list(digests):
            lost = [name for name in digests if name not in names]
            extra = [name for name in names if name not in digests]
            raise wire.TransferFailed(
                f"{record['unit']} did not arrive as it was sent",
                where=f"lost: {lost[:4]}; not sent: {extra[:4]}",
                why="the transport dropped, added or reordered tensors",
                fix=f"{wire.RETRY}; if the error comes back, the program that carries the tensors is at fault",
            )
        whole = self._whole_unit(record)
        if doubled := [name for name, _ in whole if name in self._seen]:
            raise wire.TransferFailed(
                f"{record['unit']} arrived twice",
                where=", ".join(doubled[:4]),
                why="the transport delivered the same tensors again",
                fix=f"{wire.RETRY}; if the error comes back, the program that carries the tensors is at fault",
            )
        known = {name: self.expected[name] for name, _ in whole if name in self.expected}
        check_specs([(name, TensorSpec.of(tensor)) for name, tensor in whole], known)
        if self._is_delta and self.kept:
            digests = self.kept.digests
        for (name, _), found in zip(whole, checksums(tensor for _, tensor in whole), strict=True):
            if found != digests[name]:
                raise wire.TransferFailed(
                    f"{name} was damaged on the way to the engine",
                    where=f"checksum {found & (2**64 - 1):016x}, sent as {digests[name] & (2**64 - 1):016x}",
                    why="the engine did not receive the bytes that the trainer's forward used",
                    fix=f"{wire.RETRY}; if the error comes back, check the memory of this machine",
                )
        start = time.perf_counter()
        chosen = self.plan.whole_modules(set(names)) if self._is_delta and self.skip_unchanged else None
        self.plan.write({name: tensor for name, tensor in whole if chosen is None or name.rpartition(".")[0] in chosen})
        self._applied += time.perf_counter() - start
        if self.kept and not self._is_delta:
            for name, tensor in whole:
                self.kept.put(name, tensor, digests[name])
        self._seen.update(name for name, _ in whole)
        self._unit = []

    def _whole_unit(self, record: dict[str, Any]) -> list[wire.NamedTensor]:
        """Return all tensors of the received unit on the engine's device, with changes already applied."""
        if not self._is_delta or self.kept is None:
            return self._unit
        deltas = set(record["deltas"])
        names = self._units.get(record["unit"], [])
        for name, tensor in self._unit:
            try:
                if name not in names:
                    raise ValueError(f"it is not a tensor of {record['unit']}")
                if name in deltas:
                    self.kept.change(name, tensor, record["digests"][name])
                else:
                    self.kept.put(name, tensor, record["digests"][name])
            except ValueError as error:
                raise wire.TransferFailed(
                    f"the changes of {name} cannot be applied",
                    why=str(error),
                    fix=f"{wire.RETRY}; if the error comes back, the program that carries the tensors is at fault",
                ) from error
        device = next(self.model.parameters()).device
        return [(name, self.kept.tensors[name].to(device)) for name in names]

    def _commit(self, record: dict[str, Any]) -> None:
        missing = [name for name in self.expected if name not in self._seen]
        if missing or self._unit or int(record["version"]) != self._open:
            raise wire.TransferFailed(
                f"the publish of version {self._open} is not complete",
                where=f"missing: {', '.join(missing[:8])}"
                if missing
                else f"the last record has version {record['version']}",
                fix="publish every tensor of packed_state_dict(model)",
            )
        if self.kept and self.kept.commit(self._open) != record.get("fingerprint"):
            raise wire.TransferFailed(
                f"the engine's tensors differ from version {self._open} of the trainer's",
                why="a tensor that was not sent has different checksums on the two sides",
                fix=wire.RETRY,
            )
        start = time.perf_counter()
        refresh_tied_layers(self.model)
        self._check_addresses()
        if self.kv_cache_spoilt:
            # Attention multiplies masked positions by zero, and NaN times zero is NaN.
            for cache in self.kv_caches():
                cache.zero_()
            self.kv_cache_spoilt = False
        self._applied += time.perf_counter() - start
        self.version, self._open = self._open, None

    def _check_addresses(self) -> None:
        """Raise TensorsMoved if a publish has moved a tensor that one of vLLM's CUDA graphs can have captured."""
        if not self._checks_addresses:
            return
        before, self._places = self._places, {}
        if lost := captured.moved(before, captured.places({"model": self.model})):
            shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
            raise TensorsMoved(
                f"the publish of version {self._open} moved {len(lost)} tensors that CUDA graphs have captured",
                why=f"the graphs would use memory that was freed: {shown}. A new engine has the same fault with these "
                "layers",
            )


def _in_one_line(error: BaseException) -> str:
    """Return the message of `error` without its fix, to be quoted in a later error with a different fix."""
    if not isinstance(error, UserError):
        return str(error)
    return f"{error.what}: {error.why}" if error.why else error.what
