"""Levels `model` and `exact` on a CPU: decoder layers and attention of Llama-like families with vLLM's rounding.

    residual   vLLM adds in FP32, normalises the unrounded sum, and keeps the sum rounded to BF16 as the residual
               (`fused_add_rms_norm` in vllm/ir/ops/layernorm.py). transformers rounds before it normalises. Here a
               layer returns the unrounded FP32 sum. The next norm reads it unrounded, and the next addition rounds it.
    rotary     vLLM's `rotary_embedding` multiplies in FP32 by BF16 cosines and sines and rounds once. transformers
               rounds each product. At level `exact` this operator turns queries and keys here, too. Where it cannot be
               called, transformers' formula gets FP32 copies of the BF16 cosines and sines, so it computes in FP32, and
               the attention function rounds queries and keys.
    attention  `qarl.align.cpu_attention`
    linears    with AMX, BF16 linears and lm_head by the engine's function (`qarl.kernels.cpu.bf16_linear`)

All other parts, such as SwiGLU and the embedding, already round in the same way on both sides. To align a
layer, its class is replaced by a subclass with the same name. Parameters, state-dict keys, hooks, gradient
checkpointing and wrapping by class name do not change.

The gradients of norms and rotary embeddings are written by hand. Autograd would also save the normalised values, and
round their gradients to BF16.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from qarl.align.attention_layer import AttentionLayer, in_fp32
from qarl.align.cpu_attention import engine_attention
from qarl.align.rotary import Turns
from qarl.kernels.cpu import bf16_linear, layer_ops


class AlignedRMSNorm(nn.Module):
    """RMSNorm that rounds the normalised value to the weight's dtype before it multiplies by the weight.

    The input is FP32 or BF16 [..., hidden].
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)
        return y


class _RMSNorm(torch.autograd.Function):
    """The norm of rows [..., hidden], in blocks of rows that stay in a core's cache.

    A block has several rows, so that threads do not share the sum of one: `hidden` is at most 32768."""

    BLOCK = 1 << 16

    @classmethod
    def blocks(cls, *tensors: Tensor) -> Any:
        rows = max(cls.BLOCK // tensors[0].shape[-1], 1)
        blocks = (tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in tensors)
        return zip(*blocks, strict=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.new_empty(x.shape, dtype=weight.dtype)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        for x_rows, y_rows, scale_rows in _RMSNorm.blocks(x, y, scale):
            x_rows = x_rows.float()
            variance = x_rows.pow(2).mean(-1, keepdim=True)
            torch.rsqrt(variance.add_(eps), out=scale_rows)
            y_rows.copy_(x_rows * scale_rows).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        weight32 = weight.float()
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(weight32) if ctx.needs_input_grad[1] else None
        for x_rows, grad, scale_rows, grad_rows in _RMSNorm.blocks(x, *grad_outputs, scale, grad_x):
            normal = x_rows * scale_rows
            grad = grad.float()
            product = grad * normal
            if grad_weight is not None:
                grad_weight += product.sum(0)
            mean = (product @ weight32).div_(len(weight)).unsqueeze(-1)
            of_normal = grad * weight32
            of_normal.addcmul_(normal, mean, value=-1)
            grad_rows.copy_(of_normal.mul_(scale_rows))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, None


class AlignedAttention(AttentionLayer):
    """Attention, and the turns of its queries and keys, by the engine's operators."""

    def turned(self, query: Tensor, key: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = _Turn.apply(query, key, *turns)
        return turned

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        output, _ = engine_attention(self, query, key, value, mask, self.scaling, **options)
        return output


class _Turn(torch.autograd.Function):
    """Rotary embedding of query and key, BF16 [B, T, heads, D], by vLLM's operator. Cosines and sines are BF16
    [B or 1, T, D], whose halves are equal."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        return layer_ops.turn(query, key, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        grad_query, grad_key = grad_outputs
        return (*layer_ops.turn(grad_query, grad_key, cosines, -sines), None, None)


class AlignedLinear(nn.Module):
    """BF16 linear whose rows do not depend on each other (`qarl.kernels.cpu.bf16_linear`)."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        return bf16_linear.linear(input, self.weight, self.bias)


class AlignedDecoderLayer(nn.Module):
    """Decoder layer that returns its hidden states as unrounded FP32 sums, [B, T, hidden].

    The input is the BF16 embeddings or the FP32 sums of the previous layer."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Turns,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(self.self_attn, AlignedAttention):
            position_embeddings = in_fp32(position_embeddings)
        normal = self.input_layernorm(hidden_states)
        output, _ = self.self_attn(
            hidden_states=normal, position_embeddings=position_embeddings, **kwargs
        )
        hidden_states = add_residual(output, hidden_states)
        normal = self.post_attention_layernorm(hidden_states)
        return add_residual(self.mlp(normal), hidden_states)


def add_residual(output: Tensor, hidden_states: Tensor) -> Tensor:
    """Round `hidden_states` to BF16, add it to `output` (BF16) in FP32, and return the FP32 sum."""
    total: Tensor = _AddResidual.apply(output, hidden_states)
    return total


class _AddResidual(torch.autograd.Function):
    """The gradient passes the rounding unchanged."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden_states: Tensor) -> Tensor:
        ctx.dtypes = output.dtype, hidden_states.dtype
        return hidden_states.bfloat16().float().add_(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad_outputs[0].to(dtype) for dtype in ctx.dtypes)


@cache
def aligned_class(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `original` that has the same name and the forward of `mixin`."""
    return type(original.__name__, (mixin, original), {"__module__": __name__})


def align_module(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Give `module` the forward of `mixin`. Its submodules and parameters stay the same."""
    module.__class__ = cast(Any, aligned_class)(mixin, type(module))


def align_decoder_layers(
    model: Any, *, engine_attends: bool, norm: type[nn.Module] = AlignedRMSNorm
) -> dict[str, int]:
    """Align the decoder layers and norms of a Llama-like causal LM. Return the number of them by kind.

    `engine_attends`: whether attention is the engine's own operator. `norm`: the forward of all norms. It takes FP32 or
    BF16 [..., hidden], and returns what the engine computes from the unrounded input, in BF16."""
    layers = model.model.layers
    norms = [model.model.norm]
    for layer in layers:
        align_module(layer, AlignedDecoderLayer)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [
            getattr(layer.self_attn, name)
            for name in ("q_norm", "k_norm")
            if hasattr(layer.self_attn, name)
        ]
        if engine_attends:
            align_module(layer.self_attn, AlignedAttention)
    for module in norms:
        align_module(module, norm)
    return {"decoder layers (residual, rotary)": len(layers), "norms": len(norms)}
