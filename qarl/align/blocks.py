"""Decoder layers of the Llama-like families (Llama, Qwen2, Qwen3) with vLLM's rounding.

    residual   vLLM adds in FP32, normalises the unrounded sum, and keeps the sum rounded to BF16 as the residual
               (`fused_add_rms_norm` in vllm/ir/ops/layernorm.py). transformers rounds before it normalises. Here a
               layer returns the unrounded FP32 sum. The next norm reads it unrounded, and the next addition rounds it.
    rotary     vLLM's `rotary_embedding` multiplies in FP32 by BF16 cosines and sines and rounds once. transformers
               rounds each product. Here transformers' formula gets FP32 copies of the BF16 cosines and sines, so it
               computes in FP32. The attention function then rounds queries and keys (`qarl.align.attention`).

All other parts, such as SwiGLU, the embedding and lm_head, already round in the same way on both sides.

To align a layer, its class is replaced by a subclass with the same name. Parameters, state-dict keys, hooks, gradient
checkpointing and wrapping by class name do not change.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn


class AlignedRMSNorm(nn.Module):
    """RMSNorm that rounds the normalised value to the weight's dtype before it multiplies by the weight.

    The input is FP32 or BF16 [..., hidden].
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x.to(self.weight.dtype) * self.weight


class AlignedDecoderLayer(nn.Module):
    """Decoder layer that returns its hidden states as unrounded FP32 sums, [B, T, hidden].

    The input is the BF16 embeddings or the FP32 sums of the previous layer."""

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
    """Round `hidden_states` to BF16, add it to `output` (BF16) in FP32, and return the FP32 sum."""
    return output.float() + hidden_states.bfloat16().float()


@cache
def aligned_class(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `original` that has the same name and the forward of `mixin`."""
    return type(original.__name__, (mixin, original), {"__module__": __name__})


def align_module(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Give `module` the forward of `mixin`. Its submodules and parameters stay the same."""
    module.__class__ = cast(Any, aligned_class)(mixin, type(module))
