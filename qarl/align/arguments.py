"""Arguments that a model passes to its attention: each acts, or the model is refused by name before the run.

transformers' classes call the function that is registered for their attention with keyword arguments. transformers'
`sdpa` ignores those that it does not know, such as Gemma 2's `softcap`. So QaRL reads the names in the source of the
model's class, and refuses those that `qarl.align.packed_attention` does not apply.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qarl.errors import UserError

APPLIED = frozenset(
    {"query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "position_ids"}
    | {"sliding_window", "softcap", "s_aux"}
)
"""Keyword arguments of an attention function that `qarl.align.packed_attention.rows_attention` applies."""
WITHOUT_SDPA = ("softcap", "s_aux")
"""Arguments that PyTorch's scaled_dot_product_attention does not have: a cap of the scores, and sinks."""
_QUERIES = 1024
"""Number of queries whose scores are in memory at once."""


def passed_arguments(source: str) -> set[str]:
    """Return the names of the keyword arguments that the classes in `source` pass to the attention function."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface"]
    return {keyword.arg for call in named for keyword in call.keywords if keyword.arg}


def check_arguments(model: Any) -> None:
    """Raise UserError if a transformers model passes its attention an argument that would have no effect."""
    check_source(model.config.model_type, inspect.getsource(sys.modules[type(model).__module__]))


def check_source(family: str, source: str) -> None:
    """Raise UserError if the classes in `source` pass their attention an argument that would have no effect."""
    passed = passed_arguments(source)
    if unknown := sorted(passed - APPLIED):
        raise _refused(family, f"the argument {', '.join(unknown)}", "QaRL's attention does not apply it")
    if "create_chunked_causal_mask" in source:
        raise _refused(family, "chunks only as a mask", "a pack of rows has no mask")
    if "create_sliding_window_causal_mask" in source and "sliding_window" not in passed:
        raise _refused(family, "a sliding window only as a mask", "a pack of rows has no mask")


def _refused(family: str, what: str, why: str) -> UserError:
    return UserError(
        f"models of the family {family} are refused, because they give their attention {what}",
        where="model.path",
        why=f"{why}, so trainer and engine would compute different models",
        fix="train a model of another family",
    )


def check_plain(level: str, module: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an attention that is causal, and nothing more, is given an argument that changes it."""
    changing = [name for name in (*WITHOUT_SDPA, "sliding_window") if given.get(name) is not None]
    if not is_causal(module, given):
        changing.append("is_causal=False")
    if changing:
        raise ValueError(
            f"quant.align={level} does not apply attention's {', '.join(changing)}; use quant.align=linears"
        )


def is_causal(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a token sees only itself and the tokens before it, as transformers' `sdpa` decides it."""
    chosen = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if chosen is None else chosen)


def scored_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [B, t, H, D] with a cap of the scores, or with sinks.

    Products and sums are FP32 (FP64 for FP64 inputs), and the output is rounded once, as in the engine.

    Args:
        query: [B, H, t, D]. `key` and `value`: [B, Hkv, keys, D].
        mask: as scaled_dot_product_attention takes it. Without it all keys count, or up to the query if `causal`.
        softcap: a score s becomes softcap · tanh(s / softcap).
        s_aux: [H], the score of a sink, which takes weight and has no value.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    tokens, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.to(wide).view(1, -1, 1, 1)
    key, value = (tensor.repeat_interleave(groups, 1).to(wide) for tensor in (key, value))

    def attend(start: int, part: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        scores = part.to(wide) @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if seen is None and causal:
            places = torch.arange(start, start + part.shape[2], device=part.device)
            seen = torch.arange(keys, device=part.device) <= places[:, None]
        if seen is not None and seen.dtype == torch.bool:
            scores = scores.masked_fill(~seen, torch.finfo(wide).min)
        elif seen is not None:
            scores = scores + seen
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
        weights = F.dropout(scores.softmax(-1)[..., :keys], dropout)
        return (weights @ value).to(part.dtype).transpose(1, 2)

    if tokens <= _QUERIES:
        return attend(0, query, mask)
    parts = []
    for start in range(0, tokens, _QUERIES):
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start : start + _QUERIES]
        part = query[:, :, start : start + _QUERIES]
        parts.append(checkpoint(attend, start, part, seen, use_reentrant=False))
    return torch.cat(parts, 1)
