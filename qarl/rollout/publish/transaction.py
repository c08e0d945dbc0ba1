"""The weights of one worker of the engine, and the transaction that replaces them.

From the begin of a publish to its end the weights are `stale`. If the publish fails, for example because a tensor is
missing or damaged, or because vLLM refuses it, they stay stale. An engine with stale weights must not generate, because
it may have weights of two versions. The next complete publish repairs it. After `ReloadFailed` they are `broken`, and
the engine must be replaced.

A trainer in the same process has all tensors at once, and has checked them (`replacing`). What arrives from another
process comes in parts (`qarl.rollout.remote.receive`), between `begin` and `finish` or `fail`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qarl.rollout.publish import graph_addresses
from qarl.rollout.publish.manifest import Manifest
from qarl.rollout.publish.version import checked_version, note_older
from qarl.rollout.publish.writers import ReloadFailed, TensorsMoved, WritePlan, refresh_tied_layers
from qarl.vllm_versions import kv_cache_tensors


class EngineWeights:
    """The weights of one worker of the engine, for the worker's whole life.

    expected         the manifest of a publish
    plan             where each published tensor belongs
    version          the version of the last complete publish, or None while the weights are stale
    stale_because    why they are stale
    in_doubt         whether a publish has failed since the last complete one, so that nobody knows what they are
    broken           whether the engine must be replaced
    kv_cache_spoilt  whether the KV caches may hold NaN, so that the next publish must set them to zero
    seconds          seconds of the last publish by `replacing`
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        expected: Manifest,
        *,
        kv_caches: Callable[[], Iterable[torch.Tensor]],
        direct: bool = True,
    ) -> None:
        """`expected`: the manifest, built from the engine's own config. `kv_caches`: a function that returns vLLM's KV
        caches. `direct`: write directly into vLLM's storage if possible, not through its reload."""
        self.model = model
        self.expected = expected
        self.plan = WritePlan(model, vllm_config, expected, direct=direct)
        self.kv_caches = kv_caches
        self.version: int | None = None
        self.stale_because: str = "nothing has been published to it yet"
        self.in_doubt = True
        self.broken = False
        self.kv_cache_spoilt = False
        self.seconds: dict[str, float] = {}
        self.under_way: int | None = None
        """The version of the publish that has begun and not ended."""
        self._checks_addresses = graph_addresses.graphs_captured(vllm_config)
        self._slots: dict[str, graph_addresses.TensorSlot] = {}

    @classmethod
    def of_runner(cls, runner: Any, expected: Manifest, *, direct: bool = True) -> EngineWeights:
        """Return the weights of the model of `runner`, one worker's model runner."""
        return cls(
            runner.get_model(),
            runner.vllm_config,
            expected,
            kv_caches=lambda: kv_cache_tensors(runner.kv_caches),
            direct=direct,
        )

    @property
    def stale(self) -> bool:
        return self.version is None

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the published weights that a trainer in this process may share, as views of the engine's memory
        (`qarl.rollout.publish.cpu_layers`). Nothing may write to them."""
        return self.plan.storage(self.expected)

    def mark_stale(self, reason: str, *, doubt: bool = True) -> None:
        """Make the weights stale, with `reason`, until the next complete publish. `doubt`: whether they may be other
        weights than were published."""
        self.version = None
        self.stale_because = reason
        self.in_doubt |= doubt

    @contextmanager
    def replacing(self, version: int) -> Iterator[WritePlan]:
        """Return a context in which the caller writes all tensors of `version` with the plan, which it yields.

        After any exception the weights are stale. Raise ReloadFailed if vLLM failed, now or earlier."""
        start = time.perf_counter()
        try:
            self.begin(version)
            yield self.plan
            self.finish()
        except BaseException as error:
            self.fail("while its tensors were written", error)
            raise
        finally:
            self.seconds = {"apply": time.perf_counter() - start}

    def begin(self, version: int) -> None:
        """Begin the publish of `version`. Raise UserError if it is no version, or ReloadFailed if the engine is
        broken."""
        if self.broken:
            raise ReloadFailed(
                "this engine is broken and takes no more publishes", why=self.stale_because
            )
        version = checked_version(version)
        note_older(version, self.version)
        self.under_way = version
        self.mark_stale(f"the publish of version {version} did not complete", doubt=False)
        earlier_moves = bool(self._slots)  # those of a publish that was aborted count too
        if self._checks_addresses and not earlier_moves:
            self._slots = graph_addresses.tensor_slots({"model": self.model})

    def finish(self) -> None:
        """End a complete publish: the engine may generate."""
        refresh_tied_layers(self.model, fresh=self.plan.written)
        self._check_addresses()
        if self.kv_cache_spoilt:
            # Attention multiplies masked positions by zero, and NaN times zero is NaN.
            for cache in self.kv_caches():
                cache.zero_()
            self.kv_cache_spoilt = False
        self.version = self.under_way
        self.under_way = None
        self.in_doubt = False

    def fail(self, where: str, error: BaseException) -> None:
        """End a publish that `error` has stopped at `where`."""
        if not self.broken:
            self.abort(f"{where}: {getattr(error, 'what', error)}")
            self.broken = isinstance(error, ReloadFailed)

    def abort(self, reason: str) -> None:
        """End a publish that cannot be completed. The weights stay stale."""
        publish = "a publish"
        if self.under_way is not None:
            publish = f"the publish of version {self.under_way}"
        self.mark_stale(f"{publish} did not complete: {reason}")
        self.under_way = None

    def _check_addresses(self) -> None:
        """Raise TensorsMoved if a publish has moved a tensor that one of vLLM's CUDA graphs can have captured."""
        if not self._checks_addresses:
            return
        before = self._slots
        self._slots = {}
        lost = graph_addresses.moved(before, graph_addresses.tensor_slots({"model": self.model}))
        if not lost:
            return
        shown = ", ".join(lost[:4])
        if len(lost) > 4:
            shown += f" and {len(lost) - 4} more"
        raise TensorsMoved(
            f"the publish of version {self.under_way} moved {len(lost)} tensors that CUDA graphs have captured",
            why=f"the graphs would use memory that was freed: {shown}. A new engine has the same fault with these "
            "layers",
        )
