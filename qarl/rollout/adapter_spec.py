"""How an engine is started so that it can serve adapters (LoRA)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qarl.schemes import Scheme


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters that an engine can serve. `targets`: the last parts of the names of the linears that have one."""

    r: int
    targets: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`. A new adapter is loaded before the old one is removed, so there are two
        for a moment."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.r,
            "max_loras": 1,
            "max_cpu_loras": 2,
            "lora_target_modules": list(self.targets),
        }


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
