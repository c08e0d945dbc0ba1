"""Sums that several programs share, in a fixed order and without float atomics.

Every program writes its tile to a workspace and increments a counter. The program that arrives last adds all tiles in a
fixed order. The last program changes from run to run, but the result does not. One kernel does both steps, because a
product of few rows takes little longer than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.triton.tables import Tile, parts


@triton.jit
def leave_part(acc, workspace_ptr, counter_ptr, tile, tiles, part, parts, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write part `part` of tile `tile`. Return True in the program that arrives last, which must call `sum_parts`."""
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(workspace_ptr + (part * tiles + tile).to(tl.int64) * (ROWS * COLS) + offsets, acc)
    tl.debug_barrier()  # the whole tile must be written before one thread releases it
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == parts - 1


@triton.jit
def sum_parts(workspace_ptr, counter_ptr, tile, tiles, parts, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add the parts in the order 0, 1, 2, ... to [ROWS, COLS], in the workspace's dtype. Reset the counter to zero."""
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    acc = tl.zeros((ROWS, COLS), workspace_ptr.dtype.element_ty)
    for part in range(parts):
        start = (part * tiles + tile).to(tl.int64) * (ROWS * COLS)
        acc += tl.load(workspace_ptr + start + offsets, cache_modifier=".cg")
    tl.store(counter_ptr + tile, 0)
    return acc


def split(
    tile: Tile, tiles: int, blocks: int, size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Return how many parts each sum is split into, and the workspace and counters for them. There are `tiles` sums.
    Each adds `blocks` blocks and has a result of `size` elements. If the sums are not split, return
    (1, None, None).
    """
    count = parts(tile, tiles, blocks, device)
    if count == 1:
        return 1, None, None
    return count, torch.empty(count * tiles * size, dtype=dtype, device=device), _counters(tiles, device)


_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counters(count: int, device: torch.device) -> torch.Tensor:
    """Return int32 zeros [>= count], which every launch resets to zero.

    The launches of a stream do not overlap, so they share one tensor. A captured CUDA graph gets its own tensor, which
    each replay zeroes.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    found = _COUNTERS.get(key)
    if found is None or found.numel() < count:
        found = _COUNTERS[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return found
