"""vLLM's attention on CPU, callable from the trainer: the same operator on the same operands, so the same bits.

The engine writes keys and values into a paged cache and reads them back block by block; here the cache is made for
one call. Every token is its own request of one query, as it is when the engine decodes: the operator then sums over
the keys in an order that depends on nothing but the token's position. (A prefill of the whole row is 1.4 times
faster, but its tiles are of another width: at head size 128 the results of the two differ from the 334th key on.)
For the same reason the keys of one query are never split among threads, which would make a row depend on the rows
beside it. The operator knows no autograd; `qarl.align.attention` wraps it.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from qarl.vllm_process import configure_vllm_process

BLOCK_SIZE = 128  # vLLM's default on CPU (cache_config.block_size); results do not depend on it


@cache
def unavailable(device_type: str, head_size: int) -> str | None:
    """Why the engine's attention cannot be called for this device and head size, or None when it can."""
    if device_type != "cpu":
        return f"vLLM's attention is wrapped for cpu, not for {device_type}"
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    configure_vllm_process()
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this vLLM build has no cpu_attention_with_kv_cache"
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if head_size not in CPUAttentionBackend.get_supported_head_sizes():
        return f"vLLM's attention on CPU has no head size {head_size}"
    return None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """query BF16 [B, T, H, D], key and value BF16 [B, T, Hkv, D], any strides -> BF16 [B, T, H, D]."""
    from vllm import _custom_ops as ops

    rows, length, heads, head_size = query.shape
    kv_heads = key.shape[2]
    isa = _isa(head_size)
    blocks_per_row = -(-length // BLOCK_SIZE)
    # Zeros, not empty: the operator multiplies masked places too, and NaN times zero is NaN.
    cache_shape = (rows * blocks_per_row, kv_heads, 2 * BLOCK_SIZE, head_size)
    key_cache, value_cache = query.new_zeros(cache_shape).chunk(2, dim=2)
    positions = torch.arange(length)
    slots = (torch.arange(rows)[:, None] * blocks_per_row * BLOCK_SIZE + positions).flatten()
    ops.cpu_attn_reshape_and_cache(key.flatten(0, 1), value.flatten(0, 1), key_cache, value_cache, slots, isa)

    blocks = torch.arange(rows * blocks_per_row, dtype=torch.int32).view(rows, blocks_per_row)
    starts = torch.arange(rows * length + 1, dtype=torch.int32)
    seen = (positions + 1).to(torch.int32).repeat(rows)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=rows * length,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_size,
        seq_lens=seen,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    flat = query.flatten(0, 1).contiguous()
    output = torch.empty_like(flat)
    ops.cpu_attention_with_kv_cache(
        query=flat,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=starts,
        seq_lens=seen,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=blocks.repeat_interleave(length, dim=0),
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output.view(query.shape)


def _isa(head_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa: str = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, head_size)
    return isa
