"""The longest prompt whose attention on a CPU has the same bits however vLLM cuts it. No torch is imported here.

vLLM's operator computes the queries of a prompt in tiles, and for each tile of queries it sums the keys in tiles. The
sum over the keys of one tile has always the same order. A second tile rescales the sums of the first, so the bits of a
query depend on where the first tile of keys ends. That end depends on the number of queries in the tile, and therefore
on everything that cuts queries:

    threads         the scheduler gives each thread an equal share of a batch's keys, and cuts a prompt where a share
                    ends
    prefix cache    only the tokens behind the cached blocks are queries
    whole prompts   more queries than fit into a tile are cut in any case

A query that sees no more keys than the smallest tile of keys has a single tile, and no cut can change its bits. That
tile belongs to the largest tile of queries. Decode steps have one query, whose tile has room for thousands of keys, and
are computed alike in any batch. So responses may be longer.

The sizes are those of vLLM's csrc/cpu/cpu_attn_impl.hpp: `AttentionScheduler::calcu_default_tile_size`,
`calcu_tile_size_with_constant_q`, and `AttentionMainLoop`, which calls them. The constants of an instruction set are
those of its class `AttentionImpl` (cpu_attn_vec.hpp, cpu_attn_vec16.hpp, cpu_attn_amx.hpp).
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache

from qarl.process import cpu_fields

_KEY_BYTES = 2
"""Bytes of a number in the cache of keys and values: BF16."""
_SUM_BYTES = 4
"""Bytes of a score and of a number of a partial output: FP32."""
_MOST_QUERY_ITERATIONS = 128
"""`AttentionScheduler::MaxQTileIterNum`."""
_SC_LEVEL2_CACHE_SIZE = 191
"""Of glibc's bits/confname.h, which Python's `os.sysconf_names` lacks. glibc asks the CPU, as PyTorch does."""
_USUAL_L2 = 256 * 1024
"""Bytes of L2 cache of a core, if the system does not say. Nearly every CPU has more, so this is cautious."""


@dataclass(frozen=True)
class Tiling:
    """The constants of an instruction set.

    rows         number of rows (a query of a head each) that are multiplied at once (`MaxQHeadNumPerIteration`)
    keys         tiles of keys are a multiple of this number (`BlockSizeAlignment`)
    query_bytes  bytes of a number in the buffer of queries (`q_buffer_t`)
    """

    rows: int
    keys: int
    query_bytes: int


TILINGS = {"vec": Tiling(8, 32, 4), "vec16": Tiling(16, 16, 4), "amx": Tiling(32, 32, 2)}
"""Instruction set, as vLLM's `_get_attn_isa` names it -> its constants."""


def longest_uncut(head_size: int, *, l2_bytes: int, tiling: Tiling) -> int:
    """Return the largest number of tokens of a prompt whose bits no cut changes: the keys of the smallest tile.

    Numbers of heads, of requests and of threads only move the cuts. `l2_bytes`: L2 cache of a core; the operator plans
    for half of it.
    """
    cache = l2_bytes // 2
    query_bytes = head_size * (tiling.query_bytes + _SUM_BYTES)
    key_bytes = 2 * head_size * _KEY_BYTES
    score_bytes = tiling.rows * _SUM_BYTES
    # `calcu_default_tile_size`: the rows of the largest tile of queries
    rows = cache // (query_bytes + key_bytes + score_bytes)
    rows = min(rows, _MOST_QUERY_ITERATIONS * tiling.rows)
    rows = max(rows // tiling.rows * tiling.rows, tiling.rows)
    # `calcu_tile_size_with_constant_q`: the keys of a tile beside so many rows
    keys = (cache - rows * query_bytes) // (score_bytes + key_bytes)
    return max(keys // tiling.keys * tiling.keys, tiling.keys)


def l2_cache_bytes() -> int:
    """Return the L2 cache of a core in bytes, as the operator reads it, or a cautious number if it is not known."""
    try:
        size = os.sysconf(_SC_LEVEL2_CACHE_SIZE)
    except (ValueError, OSError):
        size = 0
    return size if size > 0 else _USUAL_L2


def instruction_set(head_size: int) -> str | None:
    """Return the operator's instruction set on this machine, or None if its constants are not in `TILINGS`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    if head_size % 32:
        return "vec16"
    return "amx" if "amx_tile" in cpu_fields().get("flags", "").split() else "vec"


@cache
def longest_exact_prompt(head_size: int) -> int:
    """Return `longest_uncut` on this machine, or 0 if its instruction set is not known."""
    name = instruction_set(head_size)
    if name is None:
        return 0
    return longest_uncut(head_size, l2_bytes=l2_cache_bytes(), tiling=TILINGS[name])
