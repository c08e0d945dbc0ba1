"""The engine's adapter as the target of a stream (`qarl.rollout.remote.receive`). An adapter is small, so all of its
tensors are kept until the last record, and are then published as in the engine's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qarl.lora.adapter import Adapter
from qarl.rollout.publish.adapters import EngineAdapter, takes_no_adapter
from qarl.rollout.publish.manifest import Manifest, NamedTensor
from qarl.rollout.publish.transaction import EngineWeights

Record = Mapping[str, Any]


class AdapterTarget:
    """Publishes what arrives as the `adapter` on the weights `base`."""

    def __init__(self, adapter: EngineAdapter, base: EngineWeights) -> None:
        self.adapter = adapter
        self.base = base
        self._first: Record = {}
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def expected(self) -> Manifest:
        return self.adapter.expected

    def begin(self, record: Record) -> None:
        self.adapter.mark_stale("the publish of an adapter did not complete")
        if self.base.stale:
            raise takes_no_adapter(
                "its base has not been published",
                "run the same command again: it publishes the base first",
            )
        self._first = record
        self._tensors = {}

    def write(self, unit: list[NamedTensor]) -> None:
        self._tensors |= {name: tensor.clone() for name, tensor in unit}

    def missing(self, arrived: set[str]) -> list[str]:
        """Return nothing: `EngineAdapter.publish` compares all tensors with the manifest."""
        return []

    def commit(self, record: Record, digests: dict[str, int]) -> None:
        adapter = Adapter(**self._first["adapter"], tensors=self._tensors)
        self._tensors = {}
        self.adapter.publish(adapter, version=record["version"])

    def fail(self, where: str, error: BaseException) -> None:
        reason = getattr(error, "what", error)
        self.adapter.mark_stale(f"the publish of an adapter did not complete: {reason}")
