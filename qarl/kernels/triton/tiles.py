"""The tile of each Triton kernel by GPU and number of rows, and sums that several programs share.

The tables for Hopper, Ampere and two kinds of Blackwell are in tiles.json. They have a list of rules for each
operation. The first rule whose `max_m` is not below the rows M decides. If no rule of a W4A16 operation serves M, the
weight is dequantized first.

Rules of an operation whose name ends in `_invariant` serve every M, and a row has the same bits with all of them. W4A16
has such rules by M, which share BK and split no sum. On Hopper a tensor core adds the products of 16 numbers of K at a
time, in ascending order, to one FP32 accumulator; neither BM nor BN changes this. Ampere's and the GeForce cards' tiles
all use one instruction (m16n8k16). This was read and tested in Triton's interpreter, not on a device. Dense FP8, and
every dense scheme on Blackwell (10.x), have one tile for every M. int8 has no such rules: exact sums are equal with any
tile.

Nothing is timed at run time, so the same shape on the same kind of GPU always gets the same tile and order of
summation. `scripts/tune_triton.py` times candidates on a GPU and writes the file.

The Ampere table also serves capabilities 8.6 and 8.9. Blackwell's table serves capability 10.x. Capability 12.x has a
table of its own: a block has 99 KB of shared memory there, not 227 KB, and no tensor memory, so its tiles are Ampere's.
The tiles of both Blackwell tables compile without spills and fit, but their speed was not measured.

Split sums have a fixed order and no float atomics. Every program writes its tile to a workspace and increments a
counter. The program that arrives last adds all tiles in a fixed order. The last program changes from run to run, but
the result does not. One kernel does both steps, because a product of few rows takes little longer than a launch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from qarl.kernels import base

PATH = Path(__file__).with_name("tiles.json")
"""The file with the tables."""


class Tile(NamedTuple):
    """BM rows by BN output channels, with BK input channels per step.

    `per_sm`: programs per SM, or 0 for one program per tile. With fewer tiles than programs, sums are split. With more
    tiles, the programs of the 8-bit kernels compute several tiles each.
    """

    BM: int
    BN: int
    BK: int
    num_warps: int = 4
    num_stages: int = 3
    per_sm: int = 0

    @property
    def launch(self) -> dict[str, int]:
        """Return Triton's launch options (not arguments of the kernel)."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def persistent(self, tiles: int, device: torch.device) -> bool:
        """Return whether programs compute several tiles each."""
        return 0 < self.per_sm * processors(device) < tiles


class Rule(NamedTuple):
    """`tile` is for shapes of at most `max_m` rows, or of any number."""

    tile: Tile
    max_m: int | None = None


@cache
def tables() -> dict[str, dict[str, tuple[Rule, ...]]]:
    """Return the tables as {architecture: {operation: rules}}."""

    def rule(entry: dict[str, Any]) -> Rule:
        return Rule(Tile(*entry["tile"]), entry.get("max_m"))

    stored = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        kind: {name: tuple(map(rule, rules)) for name, rules in by_name.items()}
        for kind, by_name in stored.items()
    }


def architecture(device: torch.device) -> str:
    """Return the name of the table for `device`. For the CPU (the interpreter) it is Hopper's."""
    if not base.is_gpu(device) or torch.version.hip is not None:
        return "hopper"
    major, _ = base.capability(device)
    return {9: "hopper", 12: "blackwell_geforce"}.get(major, "ampere" if major < 9 else "blackwell")


def choose(operation: str, device: torch.device, m: int) -> Tile | None:
    """Return the tile of the first rule that serves `m` rows, or None if there is no such rule."""
    rules = tables()[architecture(device)][operation]
    return next((rule.tile for rule in rules if rule.max_m is None or m <= rule.max_m), None)


def processors(device: torch.device) -> int:
    """Return the number of SMs of `device`. Under the interpreter return 8, so that sums are split there too."""
    return base.processors(device) if base.is_gpu(device) else 8


def parts(tile: Tile, tiles: int, blocks: int, device: torch.device) -> int:
    """Return the number of programs that share the `blocks` of a sum. If it is above 1, each gets at least 4 blocks."""
    target = -(-tile.per_sm * processors(device) // max(tiles, 1))
    count = max(1, min(target, blocks // 4))
    return -(-blocks // -(-blocks // count))  # every program must get a block


@triton.jit
def leave_part(
    acc,
    workspace_ptr,
    counter_ptr,
    tile,
    tiles,
    part,
    parts,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write part `part` of tile `tile`. Return True in the program that arrives last, which must call `sum_parts`."""
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(workspace_ptr + (part * tiles + tile).to(tl.int64) * (ROWS * COLS) + offsets, acc)
    tl.debug_barrier()  # the whole tile must be written before one thread releases it
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == parts - 1


@triton.jit
def sum_parts(
    workspace_ptr, counter_ptr, tile, tiles, parts, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Add the parts in the order 0, 1, 2, ... to [ROWS, COLS], in the workspace's dtype. Reset the counter to zero."""
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    acc = tl.zeros((ROWS, COLS), workspace_ptr.dtype.element_ty)
    for part in range(parts):
        start = (part * tiles + tile).to(tl.int64) * (ROWS * COLS)
        acc += tl.load(workspace_ptr + start + offsets, cache_modifier=".cg")
    tl.store(counter_ptr + tile, 0)
    return acc


def split(
    tile: Tile,
    tiles: int,
    blocks: int,
    size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Return how many parts each sum is split into, and the workspace and counters for them. There are `tiles` sums.
    Each adds `blocks` blocks and has a result of `size` elements. If the sums are not split, return
    (1, None, None).
    """
    count = parts(tile, tiles, blocks, device)
    if count == 1:
        return 1, None, None
    return (
        count,
        torch.empty(count * tiles * size, dtype=dtype, device=device),
        _counters(tiles, device),
    )


_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counters(count: int, device: torch.device) -> torch.Tensor:
    """Return int32 zeros [>= count], which every launch resets to zero.

    The launches of a stream do not overlap, so they share one tensor. A captured CUDA graph gets its own tensor, which
    each replay zeroes.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counters = _COUNTERS.get(key)
    if counters is None or counters.numel() < count:
        counters = _COUNTERS[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return counters
