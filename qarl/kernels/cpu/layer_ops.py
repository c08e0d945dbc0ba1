"""vLLM's attention and rotary embedding on a CPU, without an engine. The same operands give the engine's bits.

Attention. The engine stores keys and values in a paged cache. `causal_attention` makes such a cache for each row
(sequence). From 334 keys on (at head size 128), the order of the operator's sums depends on the number of queries in a
request. So the prompt is one request here, as in the engine's prefill, and each response token is one request, as in
its decoding. `causal_attention` is batch-invariant, because each row is a separate call, and the keys of one query are
never split among threads (`enable_kv_split` is false, here and by `qarl.process` in the engine). The engine's prefill
is not batch-invariant, because one call computes several requests, or only a piece of a long prompt. The operator has
no autograd. `qarl.align.cpu` adds it.

Rotary embedding. It is compared with transformers' (`qarl.align.rotary`). The two read different config keys, and may
compute different angles from the same keys. For example, vLLM's `dynamic` changes the base for every length, but
transformers' `dynamic` only beyond the trained length.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch

from qarl.process import configure_vllm_process, vllm_missing

BLOCK_SIZE = 128  # vLLM's default on CPU (cache_config.block_size); results do not depend on it


@cache
def attention_unavailable(device_type: str, head_size: int) -> str | None:
    """Return why the engine's attention cannot be called for this device and head size, or None if it can."""
    if device_type != "cpu":
        return f"QaRL calls vLLM's attention only on cpu, not on {device_type}"
    if missing := vllm_missing():
        return missing
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this vLLM build has no cpu_attention_with_kv_cache"
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if head_size not in CPUAttentionBackend.get_supported_head_sizes():
        return f"vLLM's attention on CPU has no head size {head_size}"
    return None


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, prompt_length: int
) -> torch.Tensor:
    """Compute a row's BF16 [T, H, D] from query BF16 [T, H, D], key and value BF16 [T, Hkv, D], any strides.

    `prompt_length`: number of tokens that the engine prefilled, or 0 if it decoded the whole row.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    length, heads, head_size = query.shape
    kv_heads = key.shape[1]
    isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, head_size)
    blocks = -(-length // BLOCK_SIZE)
    # The cache must start as zeros, because the operator also multiplies masked places, and NaN times zero is NaN.
    key_cache, value_cache = query.new_zeros(blocks, kv_heads, 2 * BLOCK_SIZE, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(length), isa)

    # The end of each request's queries, which is also the number of keys that its last query sees.
    ends = torch.arange(max(prompt_length, 1), length + 1, dtype=torch.int32)
    starts = torch.cat([ends.new_zeros(1), ends])
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(ends),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_size,
        seq_lens=ends,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    output = query.new_empty(query.shape)
    ops.cpu_attention_with_kv_cache(
        query=query.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=ends,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(blocks, dtype=torch.int32).expand(len(ends), -1).contiguous(),
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output


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
        rotary = rotary_embedding.get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dual_chunk_attention_config=getattr(config, "dual_chunk_attention_config", None),
            dtype=torch.bfloat16,
        )
    for key in set(modules) - before:
        del modules[key]
    return rotary


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
