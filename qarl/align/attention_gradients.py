"""The gradients of causal attention in a pack of rows, for an operator that has no backward.

A pack is cut into spans: a prompt that rows share, each response behind it, or a whole row with a prompt of its own. A
span's queries see the tokens before the span in its row (`prefix`) and those of the span up to themselves. Spans of
similar lengths are computed together, in FP32. What a shared prompt's keys and values get from all of its responses is
added in FP32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.cpu.layer_ops import Group

_SCORES = 1 << 17
"""Number of scores that the spans of a set have at once, so that they stay in a core's cache."""
_QUERIES = 64
"""Number of queries, about, whose scores are in memory at once."""
_LARGEST_PADDING = 1.5
"""Scores of a set with padding over those without."""


def pack_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_output: torch.Tensor,
    scaling: float,
    groups: tuple[Group, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients for query, key and value in their dtype.

    `query` and `grad_output` are [T, H, D], `key` and `value` [T, Hkv, D], in the order of `groups`."""
    size = query.shape[2]
    sets = _sets(groups, query.shape[1])
    queries, grads = (
        tensor.flatten(1).index_select(0, sets.queries) for tensor in (query, grad_output)
    )
    keys, values = (tensor.flatten(1).index_select(0, sets.keys) for tensor in (key, value))
    grads.masked_fill_(sets.beyond[:, None], 0.0)  # so nothing beyond a span has a gradient
    of_queries = [part.spans * part.length for part in sets.shapes]
    of_keys = [part.spans * (part.prefix + part.length) for part in sets.shapes]
    split = [tensor.split(of_queries) for tensor in (queries, grads)]
    split += [tensor.split(of_keys) for tensor in (keys, values)]
    parts: list[list[torch.Tensor]] = []
    for part, *tensors in zip(sets.shapes, *split, strict=True):
        q, grad, k, v = (
            _copy(tensor.view(part.spans, -1, tensor.shape[1] // size, size).transpose(1, 2))
            for tensor in tensors
        )
        gradients = causal_gradients(q, k, v, grad, scaling, unseen=part.unseen)
        parts.append([each.transpose(1, 2).flatten(2).flatten(0, 1) for each in gradients])
    of_query, of_key, of_value = (torch.cat(part) for part in zip(*parts, strict=True))
    return (
        of_query.to(query.dtype).index_select(0, sets.back).view(query.shape),
        sets.summed(of_key).to(key.dtype).view(key.shape),
        sets.summed(of_value).to(value.dtype).view(value.shape),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


class _Span(NamedTuple):
    """Tokens of a pack that follow each other, and the tokens that they see before them in their row."""

    prefix: range
    tokens: range

    @property
    def scores(self) -> int:
        return len(self.tokens) * (len(self.prefix) + len(self.tokens))


class _Shape(NamedTuple):
    """The spans of a set: their number, and the longest prefix and span, to which all are padded.

    `unseen`: bool [spans, prefix]; whether a token is the prefix's padding. None if no prefix is padded.
    """

    spans: int
    prefix: int
    length: int
    unseen: torch.Tensor | None


class _Sets(NamedTuple):
    """The spans of a pack in sets.

    queries  int64 [padded tokens]; the index in the pack of each query of the sets, in their order
    beyond   bool [padded tokens]; whether a query is behind the end of its span
    keys     int64 [padded keys]; the same as `queries` for keys, those of the prefixes too
    back     int64 [T]; the index among the queries of each token of the pack
    uses     int64; the indices among the keys of each token of the pack, token by token
    starts   int64 [T]; where in `uses` a token's indices start
    """

    shapes: list[_Shape]
    queries: torch.Tensor
    beyond: torch.Tensor
    keys: torch.Tensor
    back: torch.Tensor
    uses: torch.Tensor
    starts: torch.Tensor

    def summed(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return for each token of the pack the sum of its keys' gradients [padded keys, numbers]."""
        if len(self.uses) == len(self.starts):
            return gradients.index_select(0, self.uses)
        return F.embedding_bag(self.uses, gradients, self.starts, mode="sum")


def _spans(groups: Sequence[Group]) -> list[_Span]:
    spans = []
    start = 0
    for group in groups:
        shared = range(start, start + group.prompt)
        start = shared.stop
        if len(group.responses) == 1:
            spans.append(_Span(range(0), range(shared.start, start + group.responses[0])))
            start += group.responses[0]
            continue
        spans.append(_Span(range(0), shared))
        for response in group.responses:
            spans.append(_Span(shared, range(start, start + response)))
            start += response
    return [span for span in spans if span.tokens]


def _sets_of(spans: Sequence[_Span], heads: int) -> list[list[_Span]]:
    """Sort the spans, the longest prefix and then the longest first, and distribute them over sets."""
    order = sorted(spans, key=lambda span: (len(span.prefix), len(span.tokens)), reverse=True)
    sets: list[list[_Span]] = []
    length = used = 0
    for span in order:
        longest = max(length, len(span.tokens))
        if sets:
            prefix = len(sets[-1][0].prefix)
            padded = (len(sets[-1]) + 1) * longest * (prefix + longest)
            at_once = padded * heads * min(longest, _QUERIES) // longest
            if at_once <= _SCORES and padded <= _LARGEST_PADDING * (used + span.scores):
                sets[-1].append(span)
                length = longest
                used += span.scores
                continue
        sets.append([span])
        length = len(span.tokens)
        used = span.scores
    return sets


@lru_cache(maxsize=4)  # all layers of a backward have the same rows
def _sets(groups: tuple[Group, ...], heads: int) -> _Sets:
    shapes = []
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    for spans in _sets_of(_spans(groups), heads):
        prefix = len(spans[0].prefix)
        length = max(len(span.tokens) for span in spans)
        for span in spans:
            queries.append(_padded(span.tokens, length))
            keys += [_padded(span.prefix, prefix), queries[-1]]
        lengths = torch.tensor([len(span.prefix) for span in spans])
        unseen = torch.arange(prefix) >= lengths[:, None]
        shapes.append(_Shape(len(spans), prefix, length, unseen if unseen.any() else None))
    query = torch.cat(queries)
    key = torch.cat(keys)
    beyond = query < 0
    back = torch.empty(sum(group.tokens for group in groups), dtype=torch.int64)
    back[query[~beyond]] = (~beyond).nonzero()[:, 0]
    places = (key >= 0).nonzero()[:, 0]
    uses = places[key[places].argsort(stable=True)]
    counts = key[places].bincount(minlength=len(back))
    starts = counts.cumsum(0) - counts
    return _Sets(shapes, query.clamp(min=0), beyond, key.clamp(min=0), back, uses, starts)


def _padded(tokens: range, length: int) -> torch.Tensor:
    """Return the tokens, and -1 up to `length`."""
    return F.pad(torch.arange(tokens.start, tokens.stop), (0, length - len(tokens)), value=-1)


def causal_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_output: torch.Tensor,
    scaling: float,
    *,
    unseen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of causal attention for query, key and value, in FP32 (FP64 for FP64 inputs).

    A block of queries sees all of its keys at once, so its softmax is computed again from the scores. PyTorch's
    backward needs the sums of PyTorch's forward, which would cost two more products.

    Args:
        query, grad_output: [B, H, T, D].
        key, value: [B, Hkv, P + T, D]; H is a multiple of Hkv. All queries see the first P keys, the prefix.
        unseen: bool [B, P]; keys of the prefix that no query of a row sees.
    """
    rows, heads, length, size = query.shape
    kv_heads = key.shape[1]
    prefix = key.shape[2] - length
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (tensor.to(wide).flatten(0, 1) for tensor in (key, value))
    query, grad_output = (
        tensor.to(wide).view(rows * kv_heads, -1, length, size) for tensor in (query, grad_output)
    )
    grad_query = torch.empty_like(query)
    grad_key = grad_value = key
    for start, end in reversed(_blocks(length)):
        block, grad = (
            tensor[:, :, start:end].reshape(rows * kv_heads, -1, size)
            for tensor in (query, grad_output)
        )
        block = block * scaling
        keys = key[:, : prefix + end]
        values = value[:, : prefix + end]
        scores = block @ keys.mT
        by_query = scores.view(rows, heads, end - start, prefix + end)
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        by_query[..., prefix + start :].masked_fill_(later, -torch.inf)
        if unseen is not None:
            by_query[..., :prefix].masked_fill_(unseen[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        grad_scores = torch._softmax_backward_data(grad @ values.mT, weights, -1, wide)
        grad_query[:, :, start:end] = (grad_scores @ keys).view_as(query[:, :, start:end])
        products = (grad_scores.mT @ block, weights.mT @ grad)
        if end == length:  # the last block, whose keys are all keys
            grad_key, grad_value = products
        else:
            grad_key[:, : prefix + end] += products[0]
            grad_value[:, : prefix + end] += products[1]
    return (
        grad_query.mul_(scaling).view(rows, heads, length, size),
        grad_key.view(rows, kv_heads, -1, size),
        grad_value.view(rows, kv_heads, -1, size),
    )


def _blocks(length: int) -> list[tuple[int, int]]:
    """Return start and end of blocks of about `_QUERIES` queries, and of nearly equal size."""
    size = -(-length // max(round(length / _QUERIES), 1))
    return [(start, min(start + size, length)) for start in range(0, length, size)]
