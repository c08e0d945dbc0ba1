"""Decoder layers of the Llama-like families (Llama, Qwen2, Qwen3) with vLLM's rounding.

    residual   vLLM adds in FP32, normalises the unrounded sum and keeps its BF16 rounding as the residual stream
               (`fused_add_rms_norm` in vllm/ir/ops/layernorm.py); transformers rounds first. Here the unrounded
               FP32 sum is the hidden state that travels from layer to layer: a norm reads it as it is, the next
               addition reads its rounding. transformers' own loop over the layers need not know.
    rotary     vLLM's `rotary_embedding` multiplies in FP32 by BF16 cosines and sines and rounds once; transformers
               rounds each product. Given the BF16 cosines and sines in FP32, transformers' formula promotes to
               FP32; the attention functions of `qarl.align.attention` then round queries and keys.

q_norm and k_norm of Qwen3, SwiGLU, the embedding and lm_head round alike on both sides.

A layer of a loaded model becomes an aligned one by changing its class to its own subclass, under the same name:
what FSDP2's `fully_shard` does too. Submodules, parameters, state-dict keys, hooks, gradient checkpointing and
wrapping by class name are untouched.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn


class AlignedRMSNorm(nn.Module):
    """[..., hidden] FP32 or BF16 -> the weight's dtype; the normalised value is rounded, then times the weight."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x.to(self.weight.dtype) * self.weight


class AlignedDecoderLayer(nn.Module):
    """hidden states [B, T, hidden] in (BF16 embeddings, or the FP32 sum of the layer before) -> FP32 sum."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        cos, sin = position_embeddings
        output, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=(cos.float(), sin.float()),
            **kwargs,
        )
        hidden_states = add_residual(output, hidden_states)
        return add_residual(self.mlp(self.post_attention_layernorm(hidden_states)), hidden_states)


def add_residual(output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """FP32 sum of a BF16 `output` and the BF16 rounding of `hidden_states`."""
    return output.float() + hidden_states.bfloat16().float()


@cache
def aligned_class(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward of `mixin`, under its own name."""
    return type(original.__name__, (mixin, original), {"__module__": __name__})


def align_module(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Give `module` the forward of `mixin`, which uses the submodules and parameters that are there."""
    module.__class__ = cast(Any, aligned_class)(mixin, type(module))
