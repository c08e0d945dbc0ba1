"""Attention within each row of a forward, so that packed rows cost no more than separate rows.

The trainer packs the rows of a micro-batch, one after the other, into one forward [1, tokens] without padding.
transformers' `sdpa` would compute the scores of every pair of tokens in the pack, and then mask most of them. This
module registers an attention function that runs once per row and needs no mask:

    qarl_rows   transformers' `sdpa`, row by row (levels `off` and `linears`). On CUDA a pack is one call of PyTorch's
                variable-length Flash Attention (torch.nn.attention.varlen). Neither can cap scores or has sinks, so
                such rows are computed by `scored_attention`

A padded row is also computed with its own length, so a row has the same bits padded or packed. (The last bits depend on
the size of the blocks that PyTorch's CPU attention chooses by the length.)

The trainer passes the lengths of the rows to the model's forward as `row_lengths`. Without it, as in verl, they are
computed from `position_ids`. Models without `_supports_attention_backend` do not pass them on, so these models need
padding (`qarl.align.families.PADDED`).

transformers' classes pass keyword arguments to the attention function, and its `sdpa` ignores those that it does not
know, such as Gemma 2's `softcap`. So QaRL reads the names in the source of the model's class, and refuses those that it
does not apply, by name and before the run.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from qarl.errors import UserError
from qarl.kernels.device import upload

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


ROWS_ATTENTION = "qarl_rows"

Lengths = tuple[int, ...]
RowAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Row number, query [1, H, t, D], key and value [1, Hkv, t, D] -> [1, t, H, D]."""
_LENGTHS = WeakIdKeyDictionary()
"""Positions -> their version and lengths. All layers of a forward get the same tensor, so the host reads it once."""


def register_rows_attention() -> None:
    """Register `qarl_rows` with transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ROWS_ATTENTION, rows_attention)
    AttentionMaskInterface.register(ROWS_ATTENTION, rows_mask)


def use_rows_attention(model: Any) -> bool:
    """Switch a transformers model from `sdpa` to `qarl_rows`.

    If this is impossible, change nothing and return False. Raise UserError if the model passes its attention an
    argument that would have no effect.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return False
    check_arguments(model)
    register_rows_attention()
    model.set_attn_implementation(ROWS_ATTENTION)
    return True


def attends_in_rows(model: Any) -> bool:
    """Return whether the attention of a transformers model stays within the rows of a pack without a mask."""
    name = model.config._attn_implementation
    return model._supports_attention_backend and (name.startswith("qarl_") or "flash" in name)


def rows_mask(*, attention_mask: torch.Tensor | None = None, **how: Any) -> torch.Tensor | None:
    """Return None for a pack, whose rows need no mask. Otherwise return the mask of transformers' `sdpa`.

    Arguments are those of transformers' `sdpa_mask`. transformers sets `allow_is_causal_skip` to False if it finds
    several rows in `position_ids`. It sets `use_vmap` to True if the model adds its own mask.
    """
    from transformers.masking_utils import sdpa_mask

    pack = not how.get("allow_is_causal_skip", True) and how["q_length"] == how["kv_length"]
    if attention_mask is None and pack and not how.get("use_vmap", False):
        return None
    return sdpa_mask(attention_mask=attention_mask, **how)


def lengths_of_rows(query: torch.Tensor, key: torch.Tensor, given: Mapping[str, Any]) -> Lengths | None:
    """Return the number of tokens of each row, or None if all rows of the forward are full.

    `query` [B, H, T, D], `key` [B, Hkv, keys, D]. `given`: the keyword arguments of an attention function. If B is 1,
    rows are packed. Otherwise there is one length for each of the B rows, which are padded on the right.

    Raises:
        ValueError: `row_lengths` does not describe this forward.
    """
    batch, tokens = query.shape[0], query.shape[2]
    if key.shape[2] != tokens:  # the forward continues from a cache
        return None
    lengths: Lengths | None = given.get("row_lengths")
    if lengths is None:
        positions = given.get("position_ids")
        if positions is None or batch > 1 or positions.shape != (1, tokens):
            return None
        return _lengths_of_positions(positions)
    fits = sum(lengths) == tokens if batch == 1 and len(lengths) > 1 else len(lengths) == batch
    if not fits or max(lengths) > tokens or min(lengths) < 1:
        raise ValueError(f"rows of {lengths} tokens do not fit a forward of {batch} x {tokens}")
    return lengths


def _lengths_of_positions(positions: torch.Tensor) -> Lengths | None:
    """Return the lengths of rows whose positions [1, T] each go up by 1, or None for a single row."""
    version = None if positions.is_inference() else positions._version
    known = _LENGTHS.get(positions)
    if known is not None and version is not None and known[0] == version:
        lengths: Lengths | None = known[1]
        return lengths
    starts = ((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist()
    lengths = tuple(end - start for start, end in pairwise([0, *starts, positions.shape[1]])) if starts else None
    _LENGTHS[positions] = (version, lengths)
    return lengths


def in_rows(
    attend: RowAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths
) -> torch.Tensor:
    """Call `attend` for each row. Return [B, T, H, D], with zeros after the end of a padded row.

    `query` is [B, H, T, D]; `key` and `value` are [B, Hkv, T, D].
    """
    if len(query) == 1 and len(lengths) > 1:
        rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend(i, *row) for i, row in enumerate(rows)], dim=1)
    total, outputs = query.shape[2], []
    for i, row in enumerate(zip(*(tensor.split(1) for tensor in (query, key, value)), strict=True)):
        output = attend(i, *(part.split([lengths[i], total - lengths[i]], dim=2)[0] for part in row))
        outputs.append(F.pad(output, (0, 0, 0, 0, 0, total - lengths[i])))
    return torch.cat(outputs)


def rows_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Return transformers' `sdpa` within each row, [B, T, H, D]. Shapes are as in `in_rows`.

    Raises:
        ValueError: the rows have a window, but their tokens also see those after them.
    """
    lengths = lengths_of_rows(query, key, given)
    if lengths is None or attention_mask is not None:
        return _attend(module, query, key, value, attention_mask, given), None
    window, causal = given.get("sliding_window"), is_causal(module, given)
    if window is not None and not causal:
        raise ValueError("QaRL does not pack rows whose attention has a window and is not causal")
    fused = causal and not given.get("dropout") and not _needs_scores(given)
    if fused and query.is_cuda and len(query) == 1 and sum(lengths) == query.shape[2]:
        return varlen_attention(query, key, value, lengths, given.get("scaling"), window), None

    def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _attend(module, query, key, value, _window_mask(query, window), given)

    return in_rows(attend, query, key, value, lengths), None


def _needs_scores(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in WITHOUT_SDPA)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Return attention [B, t, H, D] with the arguments `given`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not _needs_scores(given):
        return sdpa_attention_forward(module, query, key, value, mask, **given)[0]
    causal = is_causal(module, given) and query.shape[2] > 1
    how = {name: given[name] for name in ("scaling", "dropout", *WITHOUT_SDPA) if name in given}
    return scored_attention(query, key, value, mask, causal=causal, **how)


def _window_mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return bool [1, 1, t, t]: each token sees `window` tokens up to itself. None if it sees all before it."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - window)[None, None]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Lengths,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return causal attention within the rows of a pack on CUDA. Tensors are [1, heads, tokens, D] in BF16 or FP16.

    `key` and `value` may have fewer heads than `query`. PyTorch's operator divides their number itself (mha_varlen_fwd
    and mha_varlen_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), in torch 2.11 (the GPU lock)
    too. Only the Python function of torch 2.13 needs to be told.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends = _ends(lengths, query.device)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    longest = max(lengths)
    output: Any = varlen_attn(
        *(q, k, v, ends, ends, longest, longest),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    attended: torch.Tensor = output[None]
    return attended


@lru_cache(maxsize=4)  # a forward and its backward have the same lengths in all layers
@torch.inference_mode(False)  # else a backward could not save it
def _ends(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Return 0 and the end of each row, int32 [rows + 1]."""
    return upload(torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device)
