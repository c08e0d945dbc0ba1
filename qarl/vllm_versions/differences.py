"""Calls and objects that differ between vLLM 0.24 and 0.29."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


def loaded_model(llm: Any) -> torch.nn.Module:
    """Return the module tree of an in-process `vllm.LLM`. vLLM has no public function for that."""
    core: Any = llm.llm_engine.engine_core
    module: torch.nn.Module = core.engine_core.model_executor.driver_worker.worker.get_model()
    return module


def kv_cache_tensors(kv_caches: Any) -> list[torch.Tensor]:
    """Return all tensors of `kv_caches`, of a model runner or of an attention layer. Attention backends nest them in
    different ways: a tensor, a list, a tuple, or a dict."""
    if isinstance(kv_caches, torch.Tensor):
        return [kv_caches]
    if isinstance(kv_caches, dict):
        kv_caches = list(kv_caches.values())
    return [tensor for item in kv_caches or () for tensor in kv_cache_tensors(item)]


def release_memory_pools() -> None:
    """Free the memory pools of vLLM's sleep mode. Call this when no tensor of the closed engine is left.

    vLLM 0.24 keeps the pools until the process ends, and refuses to start an engine while they hold memory. 0.29 drops
    them when an engine shuts down, but their memory is not free before PyTorch's cache is emptied."""
    if "vllm.device_allocator.cumem" not in sys.modules:
        return
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.instance
    if allocator is None:
        return
    held = allocator.allocator_and_pools
    pools, allocators = ([entry[i] for entry in held.values()] for i in (0, 1))
    held.clear()
    pools.clear()  # before the allocators, which a pool calls to free its memory
    gc.collect()
    torch.cuda.empty_cache()
    del allocators


def transfer_factories() -> tuple[Any, Any] | None:
    """Return vLLM's registries of transfer engines for the engine and for the trainer, or None.

    vLLM 0.24 has none for the trainer, and its worker reloads the whole model during each update."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    except ImportError:
        return None
    return WeightTransferEngineFactory, WeightTransferTrainerFactory


def describe_experts(layer: Any, hidden: int) -> None:
    """Set the attributes of an experts' layer that vLLM 0.24 reads to choose a kernel. 0.29 reads its `moe_config`."""
    layer.hidden_size, layer.apply_router_weight_on_input = hidden, False


def moe_sum(rows: torch.Tensor, output: torch.Tensor, *ids: object) -> torch.Tensor:
    """Write each token's sum over its experts to `output`. vLLM 0.29 passes `ids`, which matter only for experts that
    are spread over several GPUs. 0.24 does not."""
    from vllm import _custom_ops as ops

    ops.moe_sum(rows, output)
    return output
