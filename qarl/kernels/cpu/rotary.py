"""Call vLLM's rotary embedding without an engine, to compare it with transformers' (`qarl.align.rotary`).

The two read different config keys, and may compute different angles from the same keys. For example, vLLM's `dynamic`
changes the base for every length, but transformers' `dynamic` only beyond the trained length.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from qarl.process import configure_vllm_process


def engine_rotary(config: Any, head_size: int) -> Any:
    """Build vLLM's rotary module from this transformers config, as vLLM's Llama, Qwen2 and Qwen3 models do.

    vLLM keeps each module and returns it to later callers. So the result may be a module of an engine in this process,
    whose buffers are not readable while that engine sleeps. A new module is not left to engines that start later,
    because they would use its table, which may have been computed on a different device.

    Raise ValueError or KeyError if vLLM rejects the config's `rope_parameters`.
    """
    configure_vllm_process()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.transformers_utils.config import patch_rope_parameters

    config = copy.deepcopy(config)
    patch_rope_parameters(config)
    modules: dict[Any, Any] = getattr(rotary_embedding, "_ROPE_DICT", {})
    before = set(modules)
    with set_current_vllm_config(VllmConfig()):
        found = rotary_embedding.get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dual_chunk_attention_config=getattr(config, "dual_chunk_attention_config", None),
            dtype=torch.bfloat16,
        )
    for key in set(modules) - before:
        del modules[key]
    return found


def computed_turns(rotary: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosines and sines of the engine's table on a device, BF16 [positions, D / 2] each.

    vLLM computes its table on the engine's device. A GPU's powers and cosines differ a little from a CPU's.
    """
    with device:
        table: torch.Tensor = rotary._compute_cos_sin_cache()
    cosines, sines = table.bfloat16().chunk(2, dim=-1)
    return cosines, sines


def engine_turn(rotary: Any, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Rotate `query`, BF16 [T, D], to `positions` [T] with the engine's operator. Return BF16 [T, D]."""
    from vllm.platforms import current_platform

    # On a CPU vLLM calls `forward_cpu` if it does not compile the model; builds for GPUs lack its operator.
    # Classes with neither method are plain modules.
    call = getattr(rotary, "forward_cpu" if current_platform.is_cpu() else "forward_native", rotary)
    turned: torch.Tensor = call(positions, query.clone(), query.clone())[0]
    return turned.view(query.shape)


def cached_turns(rotary: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the cosines and sines of the engine's table, BF16 [positions, D / 2] each.

    Return None if the class of `rotary` has no such table.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if not isinstance(rotary, RotaryEmbedding) or type(rotary).forward_cpu is not RotaryEmbedding.forward_cpu:
        return None
    cosines, sines = rotary.cos_sin_cache.chunk(2, dim=-1)
    return cosines, sines
