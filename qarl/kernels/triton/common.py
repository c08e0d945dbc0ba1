"""What the Triton kernels share: casts and dot products with the same bits on a GPU and under Triton's interpreter, the
tables of tiles, and sums that several programs share.

With TRITON_INTERPRET=1 (read when a kernel is defined) kernels run in NumPy, on a machine without a GPU. In Triton 3.6
to 3.9 the interpreter is wrong in four ways:

- `tl.dot` of BF16 operands multiplies their raw bits (triton-lang/triton#11584)
- casts from FP32 to BF16 truncate
- casts to and from subnormal BF16 numbers are wrong
- casts from FP32 to FP8 round differently

On a GPU the functions here use the instruction. Under the interpreter they get the same result by integer arithmetic.
Kernels never compute on BF16 tensors: they call `to_fp32` on load and `to_bf16` on store.

Two rules make bits independent of the Triton release. Launch with `**LAUNCH`, because 3.10 changes the default for
fusing a * b + c. Write `tl.div_rn` and `tl.sqrt_rn`, because `/` and `tl.sqrt` are approximate.

Split sums have a fixed order and no float atomics. Every program writes its tile to a workspace and increments a
counter. The program that arrives last adds all tiles in a fixed order. The last program changes from run to run, but
the result does not. One kernel does both steps, because a product of few rows takes little longer than a launch.

The tables for Hopper, Ampere and two kinds of Blackwell are in tables.json. They have a list of rules for each
operation. The first rule whose `max_m` is not below the rows M decides. If no rule of a W4A16 operation serves M, the
weight is dequantized first. Rules of operations whose name ends in `_invariant` have no bound.

Nothing is timed at run time, so the same shape on the same kind of GPU always gets the same tile and order of
summation. `scripts/tune_triton.py` times candidates on a GPU and writes the file.

The Ampere table also serves capabilities 8.6 and 8.9. Blackwell's table serves capability 10.x. Capability 12.x has a
table of its own: a block has 99 KB of shared memory there, not 227 KB, and no tensor memory, so its tiles are Ampere's.
The tiles of both Blackwell tables compile without spills and fit, but their speed was not measured.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from qarl.kernels import base
from qarl.kernels.base import capability

INTERPRETED: bool = knobs.runtime.interpret
"""Whether the kernels of this process run under the interpreter."""

LAUNCH: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Options for every launch."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_bf16(x):
    """FP32 -> FP32, rounded half to even to a BF16 value. Under the interpreter the bits of a NaN may change."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        return (rounded & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_bf16(x):
    """FP32 -> BF16, half to even."""
    if _INTERPRETED:
        bits = round_bf16(x).to(tl.uint32, bitcast=True)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_fp32(x):
    """Any type that kernels load -> FP32, exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def e4m3_bits(x, HARDWARE: tl.constexpr):
    """FP32 in -448..448 -> the bits of the nearest float8_e4m3fn, half to even, as uint8. NaN gives NaN.

    `HARDWARE`: use the conversion instruction, if `has_e4m3(device)`. Without it, normal numbers are rounded by
    dropping the low 20 bits. Numbers below 2**-6 are added to 2**14, and the low bits of the sum are the code.
    """
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(code, HARDWARE: tl.constexpr):
    """float8_e4m3fn bits, as uint8 -> FP32, exact.

    The bits are moved to their places in an FP32, and the result is multiplied by 2**120.
    """
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = code.to(tl.uint32)
    value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b for BF16, int8 or e4m3 operands, summed in FP32 (int8: in int32)."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(to_fp32(a), to_fp32(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, out_dtype=acc.dtype)


def has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on `device` can use the float8_e4m3fn conversion instruction.

    GPUs before capability 8.9 do not have it, and the interpreter's version rounds differently.
    """
    return not INTERPRETED and torch.version.hip is None and capability(device) >= (8, 9)


PATH = Path(__file__).with_name("tables.json")
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
        kind: {name: tuple(map(rule, rules)) for name, rules in by_name.items()} for kind, by_name in stored.items()
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
    wanted = -(-tile.per_sm * processors(device) // max(tiles, 1))
    count = max(1, min(wanted, blocks // 4))
    return -(-blocks // -(-blocks // count))  # every program must get a block


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
    counters = _COUNTERS.get(key)
    if counters is None or counters.numel() < count:
        counters = _COUNTERS[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return counters
