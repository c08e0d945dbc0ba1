"""Level `model` on NVIDIA GPUs: the engine's operators in the trainer's forward, with their gradients.

    norms        QaRL's kernel (`qarl.kernels.triton.norms`), which the engine runs too, because vLLM's own norms sum in
                 an order that depends on the number of rows. transformers adds residuals in BF16, as the engine does
    rotary       `qarl.kernels.chains`, in FP32 from vLLM's cosines and sines. Products of BF16 numbers are exact in
                 FP32, so this is vLLM's operator bit for bit
    SwiGLU       vLLM's `silu_and_mul`
    attention    vLLM's FlashAttention 3 with one split (`qarl.kernels.cuda.layer_ops`). Its gradient is PyTorch's
                 FlashAttention 2, from the forward's output and log-sums
    lm_head      `F.linear` in BF16, as at all levels
    router       of a mixture of experts: `qarl.align.cuda_router`

`qarl.kernels.cuda.layer_ops` says what each operator rounds, and what a GPU has confirmed. For head sizes outside
`layer_ops.HEAD_SIZES`, for rollout.enforce_eager=true, in both backends, and with adapters, the level is `unconfirmed`:
it runs, but nothing is claimed about its δ, and the limit on the mismatch is that of `linears`.

The engine must run the same operators, so it must not compile the model, and it gets `layer_ops.ENGINE_ARGUMENTS`.

Linears are not part of this module. In W8A8 the engine's int8 sums are exact, so they are equal for any number of rows.
W4A16 and FP8 sum in an order that depends on the number of rows. Nor are experts, but the level exists only for kernels
whose tokens do not depend on each other: one other rounding can send a token to other experts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qarl.align.attention_layer import AttentionLayer
from qarl.align.cpu import align_module
from qarl.align.cuda_router import CudaRouter
from qarl.align.packed_attention import (
    Attended,
    Lengths,
    check_whole_rows,
    lengths_of_rows,
    places_of_tokens,
    register_attention,
)
from qarl.align.rotary import EngineRotaryEmbedding, Turns, head_size_of
from qarl.families import family_of
from qarl.kernels import chains
from qarl.kernels.base import ExpertsKernel, Kernel
from qarl.kernels.cpu import layer_ops as cpu_ops
from qarl.kernels.cuda import layer_ops
from qarl.kernels.triton import norm_widths

CUDA_ATTENTION = "qarl_cuda"


def unavailable_on_cuda(
    config: Any, capability: tuple[int, int] | None, kernels: Collection[type[Kernel]]
) -> str | None:
    """Return why this level cannot be used for a model config and a compute capability (None: unknown), or None.

    `kernels`: those of the quantized layers. For a mixture of experts, that of the experts must be among them."""
    if family_of(config).experts and (why_not := experts_unavailable(kernels)):
        return why_not
    size = head_size_of(config)
    if not layer_ops.has_head_size(size):
        return (
            f"calls FlashAttention 3, which has no heads of {size}: vLLM chooses another attention"
        )
    return norm_widths.unavailable(config.hidden_size) or layer_ops.attention_unavailable(
        capability
    )


def experts_unavailable(kernels: Collection[type[Kernel]]) -> str | None:
    """Return why the level does not exist for a mixture of experts with these kernels, or None if it does."""
    of_experts = [kernel for kernel in kernels if issubclass(kernel, ExpertsKernel)]
    if not of_experts:
        return "is built for quantized experts on cuda, not for experts in BF16"
    varying = sorted(kernel.name for kernel in of_experts if not kernel.row_invariant)
    if not varying:
        return None
    return (
        f"needs experts whose tokens do not depend on each other, and those of {', '.join(varying)} do; "
        "quant.kernels=qarl has others"
    )


def unconfirmed_on_cuda(config: Any, *, eager: bool, adapters: bool = False) -> str | None:
    """Return a sentence that says why this level promises no mismatch for a model config, or None if it promises one.

    `eager`: whether the engine runs without CUDA graphs. `adapters`: whether it has adapters (`qarl.lora.layers`).
    """
    reasons = []
    names = layer_ops.unconfirmed(experts=family_of(config).experts)
    if names:
        reasons.append(
            f"no GPU has confirmed what the engine computes in {', '.join(names)}, so no mismatch is promised; "
            "scripts/gpu_check.sh compares them"
        )
    size = head_size_of(config)
    if size not in layer_ops.HEAD_SIZES:
        reasons.append(
            f"with heads of {size}, no GPU has shown that a decode step sums attention as a prefill does"
        )
    if eager:
        reasons.append("with rollout.enforce_eager=true, no GPU has shown one split of attention")
    if adapters:
        reasons.append("vLLM's kernels for adapters sum in an order that changes from call to call")
    return f"unconfirmed: {'; '.join(reasons)}" if reasons else None


def align_layers(model: Any) -> dict[str, int]:
    """Give the layers of a transformers causal LM the forwards of this module. Return the number of them by kind."""
    base = model.model
    register_attention(CUDA_ATTENTION, cuda_attention)
    model.set_attn_implementation(CUDA_ATTENTION)
    align_module(base.rotary_emb, CudaRotaryEmbedding)
    base.rotary_emb.turns = None
    norms = 1
    routers = 0
    align_module(base.norm, CudaRMSNorm)
    for layer in base.layers:
        align_module(layer.self_attn, CudaAttention)
        if hasattr(layer.mlp, "experts"):
            align_module(layer.mlp.gate, CudaRouter)
            routers += 1
        else:
            align_module(layer.mlp, CudaMLP)
        head_norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        head_norms = [norm for norm in head_norms if norm is not None]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *head_norms):
            align_module(norm, CudaRMSNorm)
        norms += 2 + len(head_norms)
    layers = len(base.layers)
    numbers = {
        "MLPs": layers - routers,
        f"attentions ({CUDA_ATTENTION}) with rotary": layers,
        "norms": norms,
        "routers": routers,
    }
    return {kind: number for kind, number in numbers.items() if number}


class CudaRMSNorm(nn.Module):
    """RMSNorm by the kernel that the engine runs too, BF16 [..., K] -> BF16 [..., K]."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)
        return output


class CudaMLP(nn.Module):
    """SwiGLU by vLLM's operator, BF16 [..., K] -> BF16 [..., K]."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        product = _SiluAndMul.apply(self.gate_proj(x), self.up_proj(x))
        output: Tensor = self.down_proj(product)
        return output


class CudaAttention(AttentionLayer):
    """Attention by the engine's operator, behind turns in one pass."""

    def turned(self, query: Tensor, key: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = _Turn.apply(query, key, *turns)
        return turned

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        output, _ = cuda_attention(self, query, key, value, mask, self.scaling, **options)
        return output


class CudaRotaryEmbedding(EngineRotaryEmbedding):
    """Use a table that is computed on the GPU of the first forward, because vLLM computes its table on its GPU."""

    config: Any

    def forward(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> Turns:
        if not self.turns or self.turns[0].device != x.device:
            engine = cpu_ops.engine_rotary(self.config, head_size_of(self.config))
            self.turns = cpu_ops.computed_turns(engine, x.device)
        return super().forward(x, position_ids)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return layer_ops.rms_norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = layer_ops.rms_norm_backward(
            grad_outputs[0], x, weight, ctx.epsilon, weight_too=ctx.needs_input_grad[1]
        )
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return layer_ops.silu_and_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        return chains.silu_and_mul_backward(grad_outputs[0], gate, up)


class _Turn(torch.autograd.Function):
    """Rotary embedding of query and key, BF16 [B, T, heads, D]. Cosines and sines are BF16 [B or 1, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosines, sines)
        return chains.turn(query, cosines, sines), chains.turn(key, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        turns = ctx.saved_tensors
        return (*(chains.turn(grad, *turns, back=True) for grad in grad_outputs), None, None)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        lengths: Lengths,
    ) -> Tensor:
        output, log_sums = layer_ops.flash_attention(query, key, value, scale, lengths)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.scale = scale
        ctx.lengths = lengths
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        grads = layer_ops.flash_attention_backward(
            grad_outputs[0], query, key, value, output, log_sums, ctx.scale, ctx.lengths
        )
        return *grads, None, None


def cuda_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Attended:
    """Return attention as BF16 [B, T, H, D]. `query` is [B, H, T, D]; `key` and `value` are [B, Hkv, T, D].

    Rows must start at position 0, and be packed or padded on the right. Raises ValueError for masks, key-value caches
    and dropout.
    """
    check_whole_rows(module, query, key, attention_mask, dropout, kwargs)
    batch = query.shape[0]
    tokens = query.shape[2]
    lengths = lengths_of_rows(query, key, kwargs) or (tokens,) * batch
    packed = batch == 1 and sum(lengths) == tokens
    by_token = [tensor.bfloat16().transpose(1, 2) for tensor in (query, key, value)]
    if packed:
        rows = [tensor[0] for tensor in by_token]
        output = _Flash.apply(*rows, scaling, lengths)
        return output[None], None
    places = places_of_tokens(lengths, tokens, query.device)
    rows = [tensor.flatten(0, 1).index_select(0, places) for tensor in by_token]
    output = _Flash.apply(*rows, scaling, lengths)
    padded = output.new_zeros(batch * tokens, *output.shape[1:]).index_copy(0, places, output)
    return padded.unflatten(0, (batch, tokens)), None
