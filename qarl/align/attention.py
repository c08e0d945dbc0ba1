"""Attention as the rollout engine computes it, registered in transformers' AttentionInterface under two names.

vLLM's kernel for CPUs reads BF16 queries, keys and values and works in FP32 until it rounds the output once. It scales
the queries before the product with the keys (csrc/cpu/cpu_attn_vec.hpp); PyTorch scales the product, which leaves 10 to
300 times as many outputs different where the scale is no power of two.

    qarl_fp32     the same in PyTorch: FP32 scaled_dot_product_attention on the BF16 operands (level `model`)
    qarl_engine   vLLM's operator itself; its backward recomputes the FP32 attention (level `exact`)

(transformers' `sdpa` on BF16 tensors rounds the softmax's weights to BF16 between the two products.)
Queries and keys arrive in FP32 from the rotary embedding (see `qarl.align.blocks`) and are rounded here; values do so
when they come out of a key-value cache, which has one dtype for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qarl.kernels import vllm_attention

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
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D] BF16; causal where there is no mask."""
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
    return output.bfloat16().transpose(1, 2), None


class _EngineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        module: nn.Module,
        scaling: float,
        prompt_lengths: Sequence[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.module, ctx.scaling = module, scaling
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return vllm_attention.causal_attention(query, key, value, scaling, prompt_lengths)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            query, key, value = inputs
            output, _ = fp32_attention(ctx.module, query, key, value, None, ctx.scaling)
        return (*torch.autograd.grad(output, inputs, grad_outputs), None, None, None)


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
    output = _EngineAttention.apply(query.bfloat16(), key.bfloat16(), value.bfloat16(), module, scaling, prefilled)
    return output, None
