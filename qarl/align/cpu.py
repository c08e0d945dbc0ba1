"""Levels `model` and `exact` on a CPU: decoder layers and attention of Llama-like families with vLLM's rounding.

    residual   vLLM adds in FP32, normalises the unrounded sum, and keeps the sum rounded to BF16 as the residual
               (`fused_add_rms_norm` in vllm/ir/ops/layernorm.py). transformers rounds before it normalises. Here a
               layer returns the unrounded FP32 sum. The next norm reads it unrounded, and the next addition rounds it.
    rotary     vLLM's `rotary_embedding` multiplies in FP32 by BF16 cosines and sines and rounds once. transformers
               rounds each product. Here transformers' formula gets FP32 copies of the BF16 cosines and sines, so it
               computes in FP32. The attention function then rounds queries and keys.
    attention  `qarl_fp32`, in PyTorch with FP32 products of the BF16 operands (level `model`), or `qarl_engine`, vLLM's
               own operator (level `exact`)

All other parts, such as SwiGLU, the embedding and lm_head, already round in the same way on both sides. To align a
layer, its class is replaced by a subclass with the same name. Parameters, state-dict keys, hooks, gradient
checkpointing and wrapping by class name do not change.

Both attention functions compute each row by itself (`qarl.align.packed_attention`), so a row's bits depend neither on
other rows nor on padding or packing. Both round queries, keys and values to BF16 first, because the aligned rotary
embedding and a key-value cache return FP32. Their gradients are those of unrounded FP32 attention.

vLLM's CPU kernel has two variants. Both sum in FP32 and round the output once. `qarl_fp32` follows the variant that
vLLM uses on this CPU:

    vectors   without AMX (csrc/cpu/cpu_attn_vec.hpp). The queries are scaled before the product with the keys. PyTorch
              scales the product. That changes the result unless the scale is a power of two
    tiles     with AMX (csrc/cpu/cpu_attn_amx.hpp). The product is scaled. exp(score - largest score) is rounded to
              BF16 before it multiplies the values, but the divisor sums the unrounded numbers. Without this rounding,
              one output in five differs from vLLM's
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from qarl.align.packed_attention import check_plain, check_whole_rows, in_rows, lengths_of_rows
from qarl.kernels.cpu import layer_ops


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


FP32_ATTENTION = "qarl_fp32"
ENGINE_ATTENTION = "qarl_engine"


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
    """Return attention as BF16 [B, T, H, D]. `query` is [B, H, T, D]; `key` and `value` are [B, Hkv, T, D].

    Attention is causal if `attention_mask` is None. `kwargs` may contain the lengths of the rows
    (`qarl.align.packed_attention`).
    """
    check_plain("model", module, kwargs)
    tiles = not dropout and layer_ops.uses_tiles(query.device.type, query.shape[-1])

    def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not tiles:
            return _sdpa(query, key, value, attention_mask, scaling, dropout)
        row = (query.bfloat16(), key.bfloat16(), value.bfloat16())
        output: torch.Tensor = _TileAttention.apply(*row, attention_mask, scaling)
        return output

    lengths = lengths_of_rows(query, key, kwargs)
    if lengths is None or attention_mask is not None:
        return attend(0, query, key, value), None
    return in_rows(attend, query, key, value, lengths), None


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return attention with the vector kernel's rounding. Shapes are as in `fp32_attention`."""
    query, key, value = (tensor.bfloat16().float() for tensor in (query, key, value))
    if attention_mask is None and query.shape[2] == key.shape[2] and not dropout:
        output = _causal_rows(query, key, value, scaling)
    else:
        causal = attention_mask is None and query.shape[2] > 1
        how = {"attn_mask": attention_mask, "dropout_p": dropout, "is_causal": causal}
        output = _scaled_query(scaling, query, key, value, **how)
    return output.bfloat16().transpose(1, 2)


def _scaled_query(
    scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query * scaling, key, value, scale=1.0, enable_gqa=grouped, **how)


_WHOLE_SUM = 192
"""Largest number of keys over which PyTorch's FP32 product adds in one chain, as vLLM's kernel does (measured)."""


def _causal_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return causal attention [B, H, T, D], all FP32. The first `_WHOLE_SUM` tokens have the bits of vLLM's kernel.

    PyTorch adds in another order at lengths that are not a multiple of 16. So zeros are added at the end, which no
    token sees. It also splits the sums of all tokens of a longer row, so the first tokens are computed alone.
    """
    length = query.shape[2]
    padded = [F.pad(tensor, (0, 0, 0, -length % 16)) for tensor in (query, key, value)]
    output = _scaled_query(scaling, *padded, is_causal=True)[:, :, :length]
    if length <= _WHOLE_SUM:
        return output
    first = (tensor[:, :, :_WHOLE_SUM] for tensor in (query, key, value))
    return torch.cat([_scaled_query(scaling, *first, is_causal=True), output[:, :, _WHOLE_SUM:]], 2)


_QUERIES = 64
"""Number of queries in each call of `_tile_rounded`."""


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
        # The caller gave a mask, or there is one query that continues from a cache.
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
    """Return causal attention [T, H, D] from `query` [H, T, D], and `key` and `value` [Hkv, T, D].

    Queries are computed in blocks of equal size, with zeros after the last query. A block reads no keys after its end,
    so later tokens cannot change its bits.
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
    """Return attention with the tile kernel's rounding: BF16 [..., T, D] from FP32 [..., T, D] inputs.

    `mask` has the form that scaled_dot_product_attention takes. If a query sees no key (padding on the left), its
    output is 0, not NaN.
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
    """Return the gradients for query, key and value, computed from the FP32 attention."""
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
        return layer_ops.causal_attention(query, key, value, scaling, prompt_lengths)

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
    """Compute attention with vLLM's operator. Shapes are as in `fp32_attention`.

    Rows must start at position 0, and be packed or padded on the right. Raises ValueError for masks, key-value caches
    and dropout.

    `prompt_lengths` [rows] is an extra argument of the model's forward: the number of tokens that the engine prefilled
    in each row. Without it, tokens are computed as if the engine had decoded all of them.
    """
    check_whole_rows("exact", module, query, key, attention_mask, dropout, kwargs)
    lengths = lengths_of_rows(query, key, kwargs) or (query.shape[2],) * len(query)
    prefilled = [0] * len(lengths) if prompt_lengths is None else prompt_lengths.tolist()

    def attend(i: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        row = (query.bfloat16(), key.bfloat16(), value.bfloat16())
        output: torch.Tensor = _EngineAttention.apply(*row, scaling, prefilled[i : i + 1])
        return output

    return in_rows(attend, query, key, value, lengths), None
