"""Attention at levels `model` and `exact` on a CPU, with vLLM's rounding.

    qarl_engine   vLLM's own operator (level `exact`)
    qarl_fp32     where the operator cannot be called: PyTorch, with FP32 products of the BF16 operands (level `model`)

Both compute each row by itself (`qarl.align.packed_attention`), so a row's bits depend neither on other rows nor on
padding or packing. Both round queries, keys and values to BF16 first, because a rotary embedding in FP32 and a
key-value cache return FP32. Their gradients are those of unrounded FP32 attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from qarl.align.packed_attention import check_plain, in_rows, lengths_of_rows
from qarl.config.level import Level
from qarl.kernels.cpu import layer_ops

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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with vLLM's operator. Shapes are as in `fp32_attention`.

    The operator computes rows that start at position 0, packed or padded on the right. For masks, key-value caches and
    dropout, which no training has, this calls `fp32_attention`.

    `prompt_lengths` [rows] is an extra argument of the model's forward: the number of tokens that the engine prefilled
    in each row. Without it, tokens are computed as if the engine had decoded all of them. `later_prefills` is another:
    the parts of each row that it prefilled after a turn of a conversation (`layer_ops.Row`).
    """
    if attention_mask is not None or dropout or query.shape[2] != key.shape[2]:
        return fp32_attention(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    check_plain(Level.EXACT, module, kwargs)
    batch = query.shape[0]
    total = query.shape[2]
    lengths = lengths_of_rows(query, key, kwargs) or (total,) * batch
    prompts = [0] * len(lengths) if prompt_lengths is None else prompt_lengths.tolist()
    tokens = [tensor.bfloat16().transpose(1, 2) for tensor in (query, key, value)]
    if sum(lengths) == batch * total:
        pack = [tensor.flatten(0, 1) for tensor in tokens]
    else:
        valid = torch.arange(total) < torch.tensor(lengths)[:, None]
        pack = [tensor[valid] for tensor in tokens]
    later = later_prefills or [()] * len(lengths)
    rows = tuple(map(layer_ops.Row, lengths, prompts, later))
    output: torch.Tensor = _EngineAttention.apply(*pack, scaling, rows)
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
        rows: tuple[layer_ops.Row, ...],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling, ctx.lengths = scaling, tuple(row.length for row in rows)
        return layer_ops.causal_attention(query, key, value, scaling, rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = (*ctx.saved_tensors, *grad_outputs)
        parts = []
        sets = _sets_of_rows(ctx.lengths, tensors[0].shape[1])
        padded = [tensor.flatten(1).index_select(0, sets.slots) for tensor in tensors]
        padded[3].masked_fill_(
            sets.beyond[:, None], 0.0
        )  # so nothing beyond a row's end has a gradient
        sizes = [count * length for count, length in sets.shapes]
        size = tensors[0].shape[2]
        for (count, length), *operands in zip(
            sets.shapes, *(tensor.split(sizes) for tensor in padded), strict=True
        ):
            by_head = (
                operand.view(count, length, -1, size).transpose(1, 2) for operand in operands
            )
            query, key, value, grad = (
                _copy(operand, torch.float32).flatten(0, 1) for operand in by_head
            )
            gradients = causal_gradients(query, key, value, grad, ctx.scaling)
            by_token = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in gradients)
            parts.append([_copy(part, tensors[0].dtype).flatten(0, 1) for part in by_token])
        return (
            *(torch.cat(part).index_select(0, sets.back) for part in zip(*parts, strict=True)),
            None,
            None,
        )


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, memory_format=torch.contiguous_format)


class _Sets(NamedTuple):
    """Packed rows in sets of similar length, padded to the longest row of their set.

    shapes  of each set: its number of rows, and their padded length
    slots   int64 [padded tokens]; the index in the pack of each token of the sets, in their order
    beyond  bool [padded tokens]; whether a token is behind the end of its row
    back    int64 [tokens of the pack]; the index in the sets of each token of the pack
    """

    shapes: list[tuple[int, int]]
    slots: torch.Tensor
    beyond: torch.Tensor
    back: torch.Tensor


_SCORES = 1 << 17
"""Number of scores that the rows of a set have at once in the backward, so that they stay in a core's cache."""


@lru_cache(maxsize=4)  # all layers of a backward have the same rows
def _sets_of_rows(lengths: tuple[int, ...], heads: int) -> _Sets:
    starts = torch.tensor([0, *accumulate(lengths)])
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    shapes = []
    slots = []
    beyond = []
    while order:
        longest = lengths[order[0]]
        count = max(_SCORES // (heads * min(longest, _QUERIES) * longest), 1)
        rows = order[:count]
        order = order[count:]
        after = torch.arange(longest) >= torch.tensor([lengths[row] for row in rows])[:, None]
        slots.append((starts[rows, None] + torch.arange(longest)).masked_fill(after, 0).flatten())
        beyond.append(after.flatten())
        shapes.append((len(rows), longest))
    padded = torch.cat(slots)
    after = torch.cat(beyond)
    back = torch.empty(sum(lengths), dtype=torch.int64)
    back[padded[~after]] = (~after).nonzero()[:, 0]
    return _Sets(shapes, padded, after, back)


_QUERIES = 64
"""Number of queries whose scores the backward has in memory at once."""


def causal_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_output: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of causal attention for query, key and value, in FP32 (FP64 for FP64 inputs).

    A block of queries sees all of its keys at once, so its softmax is computed again from the scores. PyTorch's
    backward needs the sums of PyTorch's forward, which would cost two more products.

    Args:
        query, grad_output: [H, T, D]. `key`, `value`: [Hkv, T, D]; H is a multiple of Hkv. Rows of equal length may
            follow each other in the first dimension, each with all of its heads.
    """
    heads, length, size = query.shape
    groups = heads // len(key)
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.to(wide)
    value = value.to(wide)
    query, grad_output = (
        tensor.to(wide).view(-1, groups, length, size) for tensor in (query, grad_output)
    )
    grad_query = torch.empty_like(query)
    grad_key = key
    grad_value = value
    for start in reversed(range(0, length, _QUERIES)):
        end = min(start + _QUERIES, length)
        block, grad = (
            tensor[:, :, start:end].reshape(-1, groups * (end - start), size)
            for tensor in (query, grad_output)
        )
        block = block * scaling
        keys = key[:, :end]
        values = value[:, :end]
        scores = block @ keys.mT
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores.unflatten(1, (groups, -1))[..., start:].masked_fill_(later, -torch.inf)
        weights = scores.softmax(-1)
        grad_scores = torch._softmax_backward_data(grad @ values.mT, weights, -1, wide)
        grad_query[:, :, start:end] = (grad_scores @ keys).view(-1, groups, end - start, size)
        products = (grad_scores.mT @ block, weights.mT @ grad)
        if end == length:  # the last block, whose keys are those of the row
            grad_key, grad_value = products
        else:
            grad_key[:, :end] += products[0]
            grad_value[:, :end] += products[1]
    return grad_query.mul_(scaling).view(heads, length, size), grad_key, grad_value
