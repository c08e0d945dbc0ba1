"""Attention at levels `model` and `exact` on a CPU, with vLLM's rounding.

    qarl_engine   vLLM's own operator (level `exact`)
    qarl_fp32     where the operator cannot be called: PyTorch, with FP32 products of the BF16 operands (level `model`)

Both compute each row by itself (`qarl.align.packed_attention`), so a row's bits depend neither on other rows nor on
padding or packing. Rows may share their prompt only with the operator, which changes no bit either. Both round queries,
keys and values to BF16 first, because a rotary embedding in FP32 and a key-value cache return FP32. Their gradients are
those of unrounded FP32 attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qarl.align.attention_gradients import pack_gradients
from qarl.align.packed_attention import check_plain, in_rows, lengths_of_rows
from qarl.config.level import Level
from qarl.kernels.cpu import layer_ops
from qarl.kernels.cpu.layer_ops import Group

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
    check_plain(Level.MODEL, module, kwargs)

    def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.bfloat16().float() for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(
            query * scaling,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=attention_mask is None and query.shape[2] > 1,
            scale=1.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.bfloat16().transpose(1, 2)

    lengths = lengths_of_rows(query, key, kwargs)
    if lengths is None or attention_mask is not None:
        return attend(0, query, key, value), None
    return in_rows(attend, query, key, value, lengths), None


def engine_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    prompt_lengths: torch.Tensor | None = None,
    later_prefills: Sequence[tuple[tuple[int, int], ...]] | None = None,
    groups: tuple[Group, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with vLLM's operator. Shapes are as in `fp32_attention`.

    The operator computes rows that start at position 0, packed or padded on the right. For masks, key-value caches and
    dropout, which no training has, this calls `fp32_attention`.

    `prompt_lengths` [rows] is an extra argument of the model's forward: the number of tokens that the engine prefilled
    in each row. Without it, tokens are computed as if the engine had decoded all of them. `later_prefills` is another:
    the parts of each row that it prefilled after a turn of a conversation (`layer_ops.Row`). `groups` says both, and
    which rows of a pack share their prompt; a row of `row_lengths` is then a whole group.

    Raise ValueError if rows share prompts in a forward with a mask, a key-value cache or dropout.
    """
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        if any(len(group.rows) > 1 for group in groups or ()):
            raise ValueError("rows cannot share prompts with a mask, a cache or attention dropout")
        return fp32_attention(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    check_plain(Level.EXACT, module, kwargs)
    batch = query.shape[0]
    total = query.shape[2]
    lengths = lengths_of_rows(query, key, kwargs) or (total,) * batch
    if groups is None:
        prompts = [0] * len(lengths) if prompt_lengths is None else prompt_lengths.tolist()
        later = later_prefills or [()] * len(lengths)
        rows = map(layer_ops.Row, lengths, prompts, later)
        groups = tuple(Group((row,)) for row in rows)
    tokens = [tensor.bfloat16().transpose(1, 2) for tensor in (query, key, value)]
    if sum(lengths) == batch * total:
        pack = [tensor.flatten(0, 1) for tensor in tokens]
    else:
        valid = torch.arange(total) < torch.tensor(lengths)[:, None]
        pack = [tensor[valid] for tensor in tokens]
    output: torch.Tensor = _EngineAttention.apply(*pack, scaling, groups)
    if len(output) == batch * total:
        return output.unflatten(0, (batch, total)), None
    padded = output.new_zeros(batch, total, *output.shape[1:])
    padded[valid] = output
    return padded, None


def uses_engine_attention(model: Any) -> bool:
    """Return whether a transformers model attends by `engine_attention`, whose forward takes `prompt_lengths`."""
    return bool(model.config._attn_implementation == ENGINE_ATTENTION)


class _EngineAttention(torch.autograd.Function):
    """Attention of packed rows, BF16 [T, H, D], by vLLM's operator, with the gradients of unrounded FP32 attention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        groups: tuple[Group, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.groups = scaling, groups
        return layer_ops.causal_attention(query, key, value, scaling, groups)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output,) = grad_outputs
        query, key, value = ctx.saved_tensors
        gradients = pack_gradients(query, key, value, grad_output, ctx.scaling, ctx.groups)
        return (*gradients, None, None)
