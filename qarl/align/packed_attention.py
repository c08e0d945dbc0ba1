"""Attention within each row of a forward, so that packed rows cost no more than separate rows.

The trainer packs the rows of a micro-batch, one after the other, into one forward [1, tokens] without padding.
transformers' `sdpa` would compute the scores of every pair of tokens in the pack, and then mask most of them. This
module registers an attention function that runs once per row and needs no mask:

    qarl_rows   transformers' `sdpa`, row by row (levels `off` and `linears`). On CUDA a pack is one call of PyTorch's
                variable-length Flash Attention (torch.nn.attention.varlen). Neither can cap scores, so such rows are
                computed by `scored_attention`

A padded row is also computed with its own length, so a row has the same bits padded or packed. (The last bits depend on
the size of the blocks that PyTorch's CPU attention chooses by the length.)

The trainer passes the lengths of the rows to the model's forward as `row_lengths`. Without it, as in verl, they are
computed from `position_ids`. Models without `_supports_attention_backend` do not pass them on, so these models need
padding (`Family.packs`).

transformers' classes pass keyword arguments to the attention function, and its `sdpa` ignores those that it does not
know, such as Gemma 2's `softcap`. So only families whose arguments are applied here (`qarl.align.families`) are packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from qarl.config.level import Level
from qarl.families import family_of
from qarl.kernels.base import upload

_QUERIES = 1024
"""Number of queries whose scores are in memory at once."""

Options = Mapping[str, Any]
"""Keyword arguments of an attention function."""
Attended = tuple[Tensor, None]
"""What transformers takes from an attention function: [B, T, H, D], and no weights."""


def check_plain(level: Level, module: nn.Module, options: Options) -> None:
    """Raise ValueError if an attention that is causal, and nothing more, gets an argument that changes it."""
    changing = [name for name in ("softcap", "sliding_window") if options.get(name) is not None]
    if not is_causal(module, options):
        changing.append("is_causal=False")
    if changing:
        raise ValueError(
            f"quant.align={level} does not apply attention's {', '.join(changing)}; "
            f"use quant.align={Level.LINEARS}"
        )


def check_whole_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    options: Options,
) -> None:
    """Raise ValueError unless rows start at position 0 and `check_plain` accepts the arguments `options`."""
    cached = query.shape[2] != key.shape[2]
    if mask is not None or dropout or cached:
        raise ValueError(
            "quant.align=model on a GPU needs rows from position 0, packed or padded on the right, without "
            "attention_mask, key-value cache or attention dropout"
        )
    check_plain(Level.MODEL, module, options)


def is_causal(module: nn.Module, options: Options) -> bool:
    """Return whether a token sees only itself and the tokens before it, as transformers' `sdpa` decides it."""
    chosen = options.get("is_causal")
    if chosen is None:
        chosen = getattr(module, "is_causal", True)
    return bool(chosen)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float,
) -> Tensor:
    """Return attention [B, t, H, D] with a cap of the scores.

    Products and sums are FP32 (FP64 for FP64 inputs), and the output is rounded once, as in the engine.

    Args:
        query: [B, H, t, D]. `key` and `value`: [B, Hkv, keys, D].
        mask: as scaled_dot_product_attention takes it. Without it all keys count, or up to the query if `causal`.
        softcap: a score s becomes softcap · tanh(s / softcap).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    tokens = query.shape[2]
    keys = key.shape[2]
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = (tensor.repeat_interleave(groups, 1).to(wide) for tensor in (key, value))

    def attend(start: int, part: Tensor, seen: Tensor | None) -> Tensor:
        # One operation a line, so that only two tensors of scores are in memory at once.
        scores = part.to(wide) @ key.transpose(2, 3) * scale
        scores = scores / softcap
        scores = scores.tanh()
        scores = scores * softcap
        if seen is None and causal:
            positions = torch.arange(start, start + part.shape[2], device=part.device)
            seen = torch.arange(keys, device=part.device) <= positions[:, None]
        if seen is not None and seen.dtype == torch.bool:
            scores = scores.masked_fill(~seen, torch.finfo(wide).min)
        elif seen is not None:
            scores = scores + seen
        weights = F.dropout(scores.softmax(-1), dropout)
        return (weights @ value).to(part.dtype).transpose(1, 2)

    if tokens <= _QUERIES:
        return attend(0, query, mask)
    parts = []
    for start in range(0, tokens, _QUERIES):
        rows = slice(start, start + _QUERIES)
        part = query[:, :, rows]
        seen = mask
        if mask is not None and mask.shape[2] > 1:
            seen = mask[:, :, rows]
        parts.append(checkpoint(attend, start, part, seen, use_reentrant=False))
    return torch.cat(parts, 1)


_OWN = "qarl_"
"""How the names of QaRL's attention functions begin."""
ROWS_ATTENTION = f"{_OWN}rows"

Lengths = tuple[int, ...]
RowAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Row number, query [1, H, t, D], key and value [1, Hkv, t, D] -> [1, t, H, D]."""
_LENGTHS = WeakIdKeyDictionary()
"""Positions -> their version and lengths. All layers of a forward get the same tensor, so the host reads it once."""


def register_attention(name: str, function: Callable[..., Attended]) -> None:
    """Register an attention function and `rows_mask` with transformers. A second call changes nothing.

    The function gets no empty mask (`no_mask`)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    @wraps(function)
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **how: Any,
    ) -> Attended:
        return function(module, query, key, value, unless_empty(mask), **how)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, rows_mask)


def unless_empty(mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None for the empty one of `no_mask`."""
    return mask if mask is not None and mask.numel() else None


def no_mask(model: Any) -> dict[str, Tensor]:
    """Return the arguments by which a forward that has `row_lengths` says that it needs no mask.

    Without a mask, transformers looks in the positions whether they are those of a pack, and waits for the device to
    know it (`find_packed_sequence_indices`). It hands a mask of four dimensions on as it is, so this one is empty."""
    if not model.config._attn_implementation.startswith(_OWN):
        return {}
    return {"attention_mask": torch.empty(1, 1, 0, 0, device=model.device)}


def use_rows_attention(model: Any) -> bool:
    """Switch a transformers model from `sdpa` to `qarl_rows`, if this is possible. Return whether it is."""
    config = model.config
    if not family_of(config).trained:
        return False
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return False
    register_attention(ROWS_ATTENTION, rows_attention)
    model.set_attn_implementation(ROWS_ATTENTION)
    return True


def attends_in_rows(model: Any) -> bool:
    """Return whether the attention of a transformers model stays within the rows of a pack without a mask."""
    name = model.config._attn_implementation
    return model._supports_attention_backend and (name.startswith(_OWN) or "flash" in name)


def rows_mask(*, attention_mask: Tensor | None = None, **how: Any) -> Tensor | None:
    """Return None for a pack, whose rows need no mask. Otherwise return the mask of transformers' `sdpa`.

    Arguments are those of transformers' `sdpa_mask`. transformers sets `allow_is_causal_skip` to False if it finds
    several rows in `position_ids`. It sets `use_vmap` to True if the model adds its own mask.
    """
    from transformers.masking_utils import sdpa_mask

    pack = not how.get("allow_is_causal_skip", True) and how["q_length"] == how["kv_length"]
    if attention_mask is None and pack and not how.get("use_vmap", False):
        return None
    return sdpa_mask(attention_mask=attention_mask, **how)


def lengths_of_rows(query: Tensor, key: Tensor, options: Options) -> Lengths | None:
    """Return the number of tokens of each row, or None if all rows of the forward are full.

    `query` [B, H, T, D], `key` [B, Hkv, keys, D]. `options`: the keyword arguments of an attention function. If B is 1,
    rows are packed. Otherwise there is one length for each of the B rows, which are padded on the right.

    Raises:
        ValueError: `row_lengths` does not describe this forward.
    """
    batch = query.shape[0]
    tokens = query.shape[2]
    if key.shape[2] != tokens:  # the forward continues from a cache
        return None
    lengths: Lengths | None = options.get("row_lengths")
    if lengths is None:
        positions = options.get("position_ids")
        if positions is None or batch > 1 or positions.shape != (1, tokens):
            return None
        return _lengths_of_positions(positions)
    packed = batch == 1 and len(lengths) > 1
    fits = sum(lengths) == tokens if packed else len(lengths) == batch
    if not fits or max(lengths) > tokens or min(lengths) < 1:
        raise ValueError(f"rows of {lengths} tokens do not fit a forward of {batch} x {tokens}")
    return lengths


def _lengths_of_positions(positions: Tensor) -> Lengths | None:
    """Return the lengths of rows whose positions [1, T] each go up by 1, or None for a single row."""
    version = None if positions.is_inference() else positions._version
    lengths: Lengths | None = None
    if version is not None and positions in _LENGTHS:
        known_version, lengths = _LENGTHS[positions]
        if known_version == version:
            return lengths
    jumps = (positions[0].diff() != 1).nonzero()[:, 0]
    starts = (jumps + 1).tolist()
    bounds = [0, *starts, positions.shape[1]]
    lengths = tuple(end - start for start, end in pairwise(bounds)) if starts else None
    _LENGTHS[positions] = (version, lengths)
    return lengths


def in_rows(
    attend: RowAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
) -> Tensor:
    """Call `attend` for each row. Return [B, T, H, D], with zeros after the end of a padded row.

    `query` is [B, H, T, D]; `key` and `value` are [B, Hkv, T, D].
    """
    tensors = (query, key, value)
    if len(query) == 1 and len(lengths) > 1:
        rows = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
        return torch.cat([attend(i, *row) for i, row in enumerate(rows)], dim=1)
    rows = zip(*(tensor.split(1) for tensor in tensors), strict=True)
    outputs = []
    for i, row in enumerate(rows):
        length = lengths[i]
        padding = query.shape[2] - length
        parts = [tensor.split([length, padding], dim=2)[0] for tensor in row]
        output = attend(i, *parts)
        outputs.append(F.pad(output, (0, 0, 0, 0, 0, padding)))
    return torch.cat(outputs)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Attended:
    """Return transformers' `sdpa` within each row, [B, T, H, D]. Shapes are as in `in_rows`.

    Raises:
        ValueError: the rows have a window, but their tokens also see those after them.
    """
    lengths = lengths_of_rows(query, key, options)
    if lengths is None or attention_mask is not None:
        return _attend(module, query, key, value, attention_mask, options), None
    window = options.get("sliding_window")
    causal = is_causal(module, options)
    if window is not None and not causal:
        raise ValueError("QaRL does not pack rows whose attention has a window and is not causal")
    fused = causal and not options.get("dropout") and not _needs_scores(options)
    packed = len(query) == 1 and sum(lengths) == query.shape[2]
    if fused and packed and query.is_cuda:
        scaling = options.get("scaling")
        return varlen_attention(query, key, value, lengths, scaling, window), None

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _window_mask(query, window)
        return _attend(module, query, key, value, mask, options)

    return in_rows(attend, query, key, value, lengths), None


def _needs_scores(options: Options) -> bool:
    return options.get("softcap") is not None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Options,
) -> Tensor:
    """Return attention [B, t, H, D] with the arguments `options`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not _needs_scores(options):
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    causal = is_causal(module, options) and query.shape[2] > 1
    how = {name: options[name] for name in ("scaling", "dropout", "softcap") if name in options}
    return scored_attention(query, key, value, mask, causal=causal, **how)


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Return bool [1, 1, t, t]: each token sees `window` tokens up to itself. None if it sees all before it."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - window)[None, None]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention within the rows of a pack on CUDA. Tensors are [1, heads, tokens, D] in BF16 or FP16.

    `key` and `value` may have fewer heads than `query`. PyTorch's operator divides their number itself (mha_varlen_fwd
    and mha_varlen_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), in torch 2.11 (the GPU lock)
    too. Only the Python function of torch 2.13 needs to be told.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends = _ends(lengths, query.device)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    before = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (before, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    longest = max(lengths)
    output: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    attended: Tensor = output[None]
    return attended


@lru_cache(maxsize=4)  # a forward and its backward have the same lengths in all layers
@torch.inference_mode(False)  # else a backward could not save it
def _ends(lengths: Lengths, device: torch.device) -> Tensor:
    """Return 0 and the end of each row, int32 [rows + 1]."""
    ends = list(accumulate(lengths, initial=0))
    return upload(torch.tensor(ends, dtype=torch.int32), device)


@lru_cache(maxsize=4)  # all layers of a forward have the same rows
@torch.inference_mode(False)  # else a backward could not save it
def places_of_tokens(lengths: Lengths, width: int, device: torch.device) -> Tensor:
    """Return the indices of the tokens in flattened rows that are padded on the right to `width`, int64 [tokens].

    An index by a mask would make the host wait for the device, in every layer."""
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return upload(valid.flatten().nonzero()[:, 0], device)
