"""Choose the tile for each product, from the tables for Hopper, Ampere and two kinds of Blackwell in tables.json.

A table has a list of rules for each operation. The first rule whose bounds include the shape (rows M, output channels
N, input channels K, group size) decides. `max_m`, `max_n` and `max_k` are inclusive. If no rule of a W4A16 operation
matches, the weight is dequantized first. Rules of operations whose name ends in `_invariant` have no bound on M.

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

from qarl.kernels import device as device_of

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
    """`tile` is for shapes within the bounds and, if `group_sizes` is not empty, only for these group sizes."""

    tile: Tile
    max_m: int | None = None
    max_n: int | None = None
    max_k: int | None = None
    group_sizes: tuple[int, ...] = ()

    def serves(self, m: int, n: int, k: int, group_size: int) -> bool:
        bounds = ((self.max_m, m), (self.max_n, n), (self.max_k, k))
        return all(bound is None or value <= bound for bound, value in bounds) and (
            not self.group_sizes or group_size in self.group_sizes
        )

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Rule:
        bounds = {name: entry[name] for name in ("max_m", "max_n", "max_k") if name in entry}
        return cls(Tile(*entry["tile"]), **bounds, group_sizes=tuple(entry.get("group_sizes", ())))


@cache
def tables() -> dict[str, dict[str, tuple[Rule, ...]]]:
    """Return the tables as {architecture: {operation: rules}}."""
    stored = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        architecture: {operation: tuple(map(Rule.from_json, rules)) for operation, rules in operations.items()}
        for architecture, operations in stored.items()
    }


def architecture(device: torch.device) -> str:
    """Return the name of the table for `device`. For the CPU (the interpreter) it is Hopper's."""
    if not device_of.is_gpu(device) or torch.version.hip is not None:
        return "hopper"
    major, _ = device_of.capability(device)
    return {9: "hopper", 12: "blackwell_geforce"}.get(major, "ampere" if major < 9 else "blackwell")


def choose(operation: str, device: torch.device, m: int, n: int, k: int, group_size: int = 0) -> Tile | None:
    """Return the tile of the first rule that matches the shape, or None if there is no such rule."""
    rules = tables()[architecture(device)][operation]
    return next((rule.tile for rule in rules if rule.serves(m, n, k, group_size)), None)


def processors(device: torch.device) -> int:
    """Return the number of SMs of `device`. Under the interpreter return 8, so that sums are split there too."""
    return device_of.processors(device) if device_of.is_gpu(device) else 8


def parts(tile: Tile, tiles: int, blocks: int, device: torch.device) -> int:
    """Return the number of programs that share the `blocks` of a sum. If it is above 1, each gets at least 4 blocks."""
    wanted = -(-tile.per_sm * processors(device) // max(tiles, 1))
    count = max(1, min(wanted, blocks // 4))
    return -(-blocks // -(-blocks // count))  # every program must get a block
