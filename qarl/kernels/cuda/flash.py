"""vLLM's FlashAttention 3 as the engine calls it, for the trainer: pages of keys and values, and one split.

The engine's attention reads a paged cache. Its kernel for pages of 16 tokens has tiles of 128 keys, both in a prefill
and in a decode step, for heads of 96 and 128. The kernel for contiguous keys may have other tiles, and so other bits.
So the trainer's keys and values are copied into such pages.

The engine splits the keys of a query among thread blocks if few requests run. Then the sum's order depends on the
batch. With one split it does not. On compute capability 9.0, vLLM 0.24.0 has a setting for that
(`qarl.kernels.cuda.layer_ops.ENGINE_ARGUMENTS`). FlashAttention 2 and 4 take the number of splits from a heuristic that
no setting reaches except VLLM_BATCH_INVARIANT, which replaces operators of the whole process.

Sources: vllm/v1/attention/backends/flash_attn.py, vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.24.0;
hopper/tile_size.h and hopper/flash_api.cpp of vllm-project/flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from qarl.kernels.device import upload
from qarl.process import configure_vllm_process, vllm_missing

PAGE = 16
"""Tokens in a page: vLLM's default block size on GPUs."""
HEAD_SIZES = (96, 128)
"""Head sizes for which prefill and decode have the same tiles, of `TILE` keys. With other sizes some bits differ."""
TILE = 128
CAPABILITY = (9, 0)


def unavailable(capability: tuple[int, int] | None) -> str | None:
    """Return why the engine's attention cannot be called on a GPU of this compute capability, or None if it can.

    `capability`: None if unknown, which counts as available.
    """
    if missing := vllm_missing():
        return missing
    if capability is not None and capability != CAPABILITY:
        return (
            "is built for compute capability 9.0, where vLLM runs FlashAttention 3 and can be told to use one split, "
            f"not for {capability[0]}.{capability[1]}"
        )
    return None


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, lengths: Sequence[int]
) -> torch.Tensor:
    """Return causal attention within each row of a pack, BF16 [T, H, D].

    query is BF16 [T, H, D], key and value are BF16 [T, Hkv, D]. `lengths`: tokens of each row; their sum is T.
    """
    if not query.is_cuda:
        rows = zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True)
        return torch.cat([flash_reference(q, k, v, scale) for q, k, v in rows])
    return vllm_flash_attention(query, key, value, scale, lengths)


def vllm_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, lengths: Sequence[int]
) -> torch.Tensor:
    """Call vLLM's function, with the arguments of `flash_attention`."""
    configure_vllm_process()
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pack = _pack(tuple(lengths), query.device)
    caches = [into_pages(tensor, pack.slots, pack.pages) for tensor in (key, value)]
    output: torch.Tensor = flash_attn_varlen_func(
        q=query.contiguous(),
        k=caches[0],
        v=caches[1],
        cu_seqlens_q=pack.ends,
        max_seqlen_q=max(lengths),
        seqused_k=pack.counts,
        max_seqlen_k=max(lengths),
        softmax_scale=scale,
        causal=True,
        block_table=pack.table,
        fa_version=3,
        num_splits=1,
    )
    return output


class _Pack(NamedTuple):
    """What describes the rows of a pack on the device. `pages`: their number."""

    counts: torch.Tensor
    ends: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    pages: int


@lru_cache(maxsize=4)  # all layers of a forward have the same rows
def _pack(lengths: tuple[int, ...], device: torch.device) -> _Pack:
    counts = torch.tensor(lengths, dtype=torch.int32)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    table, slots = pages(counts)
    number = int(table.max()) + 1
    counts, ends, table, slots = (upload(tensor, device) for tensor in (counts, ends, table, slots))
    return _Pack(counts, ends, table, slots, number)


def pages(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each row, int32 [rows, most pages], and the slot of each token, int64 [T].

    `counts`: int32 [rows], tokens of each row. Pages are numbered from 0 in the order of the rows. Entries after a
    row's last page are 0.
    """
    numbers = (counts.long() + PAGE - 1) // PAGE
    starts = numbers.cumsum(0) - numbers
    places = torch.arange(int(numbers.max()))
    table = torch.where(places < numbers[:, None], starts[:, None] + places, 0).to(torch.int32)
    slots = torch.cat(
        [start * PAGE + torch.arange(n) for start, n in zip(starts.tolist(), counts.tolist(), strict=True)]
    )
    return table, slots


def into_pages(tensor: torch.Tensor, slots: torch.Tensor, number: int) -> torch.Tensor:
    """Copy tensor [T, Hkv, D] into `number` pages [number, PAGE, Hkv, D]. The rest of the pages is 0."""
    cache_of_rows = tensor.new_zeros(number * PAGE, *tensor.shape[1:])
    cache_of_rows[slots] = tensor
    return cache_of_rows.view(number, PAGE, *tensor.shape[1:])


def flash_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, tile: int = TILE
) -> torch.Tensor:
    """Return causal attention of one row in PyTorch, with FlashAttention 3's rounding: BF16 [t, H, D].

    query is BF16 [t, H, D]; key and value are BF16 [T, Hkv, D]. The last query sees all keys. Keys are visited from the
    last tile to the first. After each tile the sums are rescaled to the largest score so far.
    """
    length, heads, size = query.shape
    groups = heads // key.shape[1]
    q = query.transpose(0, 1).float()
    k, v = (tensor.transpose(0, 1).repeat_interleave(groups, 0).float() for tensor in (key, value))
    last = torch.arange(length)[:, None] + k.shape[1] - length
    largest = torch.full((heads, length, 1), -torch.inf)
    divisor, output = torch.zeros(heads, length, 1), torch.zeros(heads, length, size)
    factor = scale * 1.4426950408889634  # the kernel computes powers of two
    for start in reversed(range(0, k.shape[1], tile)):
        keys = slice(start, min(start + tile, k.shape[1]))
        scores = q @ k[:, keys].transpose(1, 2)
        scores = scores.masked_fill(torch.arange(keys.start, keys.stop) > last, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        seen = largest.masked_fill(largest == -torch.inf, 0)  # a query before all keys of this tile
        weights = torch.exp2(scores * factor - seen * factor)
        kept = torch.exp2((before - seen) * factor)
        divisor = divisor * kept + weights.sum(-1, keepdim=True)
        output = output * kept + weights.bfloat16().float() @ v[:, keys]
    return (output / divisor).bfloat16().transpose(0, 1)
