"""Attention as the rollout engine computes it, registered in transformers' AttentionInterface under two names.

vLLM's kernel for CPUs reads BF16 queries, keys and values, sums in FP32 and rounds the output once. Which of its two
forms runs is the CPU's matter:

    vectors   all in FP32; the queries are scaled before the product with the keys (csrc/cpu/cpu_attn_vec.hpp). PyTorch
              scales the product, which leaves 10 to 300 times as many outputs different if the scale is not a
              power of two
    tiles     with AMX: the product is scaled, and the softmax's weights, as exp(score - largest score), are rounded to
              BF16 before they are summed with the values, though not before they are summed to their divisor
              (csrc/cpu/cpu_attn_amx.hpp). Without that rounding one output in five is another

    qarl_fp32     the same in PyTorch, from FP32 products of the BF16 operands (level `model`)
    qarl_engine   vLLM's operator itself (level `exact`)

(transformers' `sdpa` on BF16 tensors rounds the softmax's weights too, after another largest score.) The backward of
the last two is that of the attention in FP32, which they round.
Queries and keys arrive in FP32 from the rotary embedding (see `qarl.align.blocks`) and are rounded here; values do so
when they come out of a key-value cache, which has one dtype for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qarl.kernels.cpu import attention as vllm_attention

FP32_ATTENTION = "qarl_fp32"
ENGINE_ATTENTION = "qarl_engine"


def register_attention() -> None:
    """Make both names known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, function in ((FP32_ATTENTION, fp32_attention), (ENGINE_ATTENTION, engine_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


def fp32_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D] BF16; causal if there is no mask."""
    if not dropout and vllm_attention.uses_tiles(query.device.type, query.shape[-1]):
        return _TileAttention.apply(query.bfloat16(), key.bfloat16(), value.bfloat16(), attention_mask, scaling), None
    return _sdpa(query, key, value, attention_mask, scaling, dropout), None


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """As `fp32_attention`, with the vector kernel's rounding."""
    output = F.scaled_dot_product_attention(
        query.bfloat16().float() * scaling,
        key.bfloat16().float(),
        value.bfloat16().float(),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=1.0,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.bfloat16().transpose(1, 2)


_QUERIES = 64
"""Queries that `_tile_rounded` takes at a time."""


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, attention_mask)
        ctx.scaling = scaling
        length = query.shape[2]
        if attention_mask is None and length > 1:
            return torch.stack([_causal_row(*row, scaling) for row in zip(query, key, value, strict=True)])
        # A caller's mask, or one query that continues from a cache.
        if attention_mask is None:
            attention_mask = query.new_ones(1, 1, length, key.shape[2], dtype=torch.bool)
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1).float() for tensor in (key, value))
        return _tile_rounded(query.float(), key, value, attention_mask, scaling).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        return (*_sdpa_gradients(saved, mask, ctx.scaling, grad_outputs), None, None)


def _causal_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """query [H, T, D], key and value [Hkv, T, D] -> [T, H, D].

    Blocks of queries, each with the keys up to its end, all filled up with zeros: the sizes of a block's products,
    so the order of their sums, do not depend on what follows in the row.
    """
    heads, length, size = query.shape
    padding = (0, 0, 0, -length % _QUERIES)
    query, key, value = (F.pad(tensor.float(), padding) for tensor in (query, key, value))
    groups = heads // len(key)
    mask = torch.ones(_QUERIES, _QUERIES, dtype=torch.bool).tril()
    blocks = []
    for start in range(0, length, _QUERIES):
        end = start + _QUERIES
        block = query[:, start:end].reshape(len(key), groups, _QUERIES, size)
        seen = F.pad(mask, (start, 0), value=True)
        rounded = _tile_rounded(block, key[:, None, :end], value[:, None, :end], seen, scaling)
        blocks.append(rounded.reshape(heads, _QUERIES, size))
    return torch.cat(blocks, 1)[:, :length].transpose(0, 1)


def _tile_rounded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """FP32 [..., T, D] each, `mask` as scaled_dot_product_attention takes it -> BF16 [..., T, D].

    As there, a query that sees no key (padding on the left) has the output 0, where exp(-inf + inf) would be NaN.
    """
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scaling)
    scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest.masked_fill_(largest == -torch.inf, 0)).exp_()
    divisor = weights.sum(-1, keepdim=True)
    divisor.masked_fill_(divisor == 0, 1)
    return torch.matmul(weights.bfloat16().float(), value).div_(divisor).bfloat16()


def _sdpa_gradients(
    inputs: Sequence[torch.Tensor], mask: torch.Tensor | None, scaling: float, grad_outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients for query, key and value of the attention in FP32."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        output = _sdpa(query, key, value, mask, scaling)
    return torch.autograd.grad(output, (query, key, value), grad_outputs)


class _EngineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        prompt_lengths: Sequence[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling = scaling
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return vllm_attention.causal_attention(query, key, value, scaling, prompt_lengths)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*_sdpa_gradients(ctx.saved_tensors, None, ctx.scaling, grad_outputs), None, None)


def engine_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    prompt_lengths: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `fp32_attention`. Rows padded on the right, positions from 0: no mask, no key-value cache, no dropout.

    `prompt_lengths` [B]: tokens of each row that the engine prefilled (give it to the model's forward, which hands it
    on); without it, the tokens of a row are taken as decoded one by one.
    """
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        raise ValueError(
            "quant.align=exact takes whole rows padded on the right, without attention_mask, packed sequences, "
            "key-value cache or attention dropout"
        )
    prefilled = [0] * len(query) if prompt_lengths is None else prompt_lengths.tolist()
    output = _EngineAttention.apply(query.bfloat16(), key.bfloat16(), value.bfloat16(), scaling, prefilled)
    return output, None
