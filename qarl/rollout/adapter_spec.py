"""How an engine is started so that it can serve adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qarl.config.lora import ALL_LINEAR, chooses_by_name, engine_rank, is_target
from qarl.lora.adapter import adapted_leaves
from qarl.schemes import Scheme

TARGETS_KEY = "qarl_targets"
"""The entry of vLLM's `additional_config` with `AdapterSpec.entries`, for an engine in another process."""


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters that an engine can serve.

    r         their rank
    targets   the last parts of the names of the linears that have one: vLLM prepares all linears with such a name
    entries   a value of `lora.target_modules`, which may choose fewer. The others have none: vLLM adds zeros there
    """

    r: int
    targets: tuple[str, ...]
    entries: tuple[str, ...] = (ALL_LINEAR,)

    @classmethod
    def of(cls, rank: int, targets: Sequence[str]) -> AdapterSpec:
        """Return what an engine for adapters of `rank` must serve. `targets`: as in `Adapter`."""
        return cls(rank, adapted_leaves(targets), tuple(targets))

    @property
    def rank(self) -> int:
        """The engine's rank."""
        return engine_rank(self.r)

    def has(self, name: str) -> bool:
        """Return whether the linear `name` has an adapter."""
        return name.rpartition(".")[2] in self.targets and is_target(name, self.entries)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`. A new adapter is loaded before the old one is removed, so there are two
        for a moment."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "max_loras": 1,
            "max_cpu_loras": 2,
            "lora_target_modules": list(self.targets),
        }

    def added_to(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's `arguments` with those of adapters, for an engine whose workers are other processes. Which
        linears have an adapter stands in `additional_config`, if their last parts do not say it."""
        more: Mapping[str, Any] = arguments.get("additional_config", {})
        if chooses_by_name(self.entries):
            more = {**more, TARGETS_KEY: list(self.entries)}
        told = {"additional_config": dict(more)} if more else {}
        return {**arguments, **self.arguments(), **told}


def spec_of_worker(vllm_config: Any) -> AdapterSpec:
    """Return what the engine of a worker with this config of vLLM's serves. Its adapters have the engine's rank."""
    lora = vllm_config.lora_config
    additional = getattr(vllm_config, "additional_config", None)
    entries = additional.get(TARGETS_KEY) if isinstance(additional, Mapping) else None
    return AdapterSpec(
        lora.max_lora_rank,
        tuple(lora.target_modules or ()),
        tuple(map(str, entries)) if entries else (ALL_LINEAR,),
    )


def servable(spec: AdapterSpec | None, scheme: Scheme) -> AbstractContextManager[None]:
    """Return a context in which an engine with adapters can be started on a base of this scheme."""
    if spec is None or not scheme.cpu_adapter_limit or torch.cuda.is_available():
        return nullcontext()
    from qarl.rollout.vllm_plugin.adapted_int8 import adapted_int8

    return adapted_int8()


def use_vllms_loader() -> None:
    """Undo a replacement of the method with which vLLM loads adapters."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    if "_load_adapter" in vars(
        LRUCacheWorkerLoRAManager
    ):  # vLLM's own is a method of its base class
        del LRUCacheWorkerLoRAManager._load_adapter
