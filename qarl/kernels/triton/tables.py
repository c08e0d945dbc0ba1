"""Choose the tile for each product, from the tables for Hopper, Ampere and Blackwell in tables.json.

A table is a list of rules for one operation; the first whose bounds hold for the shape (rows M, output channels N,
input channels K, group size) decides. Nothing is timed at run time: the same shape on the same kind of GPU always gets
the same tile, so the same order of summation. `scripts/tune_triton.py` times candidates on a GPU and writes the file.

Rows `max_m`, `max_n`, `max_k` are inclusive upper bounds. If no rule of a W4A16 operation matches, the product is
compute-bound and the weight is dequantized first. Operations whose name ends in `_invariant` have at most one rule,
without a bound on M.

Every tile of the Ampere table fits in 99 KiB of shared memory, so that it also serves capabilities 8.6 and 8.9. The
Blackwell table holds tiles that compile there without spills; nothing is claimed about their speed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

PATH = Path(__file__).with_name("tables.json")
"""The compute capability that each table's tiles are compiled for in tests."""


class Tile(NamedTuple):
    """BM rows by BN output channels, BK input channels a step.

    `per_sm`: programs an SM. If there are fewer tiles, sums are split; if there are more, programs of 8-bit
    products are persistent, each with several tiles. 0: one program a tile.
    """

    BM: int
    BN: int
    BK: int
    num_warps: int = 4
    num_stages: int = 3
    per_sm: int = 0

    @property
    def launch(self) -> dict[str, int]:
        """Options of a launch that are Triton's, not the kernel's."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def persistent(self, tiles: int, device: torch.device) -> bool:
        """Whether programs take several tiles each."""
        return 0 < self.per_sm * processors(device) < tiles


class Rule(NamedTuple):
    """`tile` serves shapes within the bounds, of one of `group_sizes` if they are named."""

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
    """{architecture: {operation: rules}}."""
    stored = json.loads(PATH.read_text(encoding="utf-8"))
    return {
        architecture: {operation: tuple(map(Rule.from_json, rules)) for operation, rules in operations.items()}
        for architecture, operations in stored.items()
    }


@cache
def architecture(device: torch.device) -> str:
    """The table for `device`; the CPU, where only the interpreter runs, reads Hopper's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "hopper"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "hopper"}.get(major, "ampere" if major < 9 else "blackwell")


def choose(operation: str, device: torch.device, m: int, n: int, k: int, group_size: int = 0) -> Tile | None:
    """The tile of the first rule that serves the shape; None if the table leaves it to another path."""
    rules = tables()[architecture(device)][operation]
    return next((rule.tile for rule in rules if rule.serves(m, n, k, group_size)), None)


@cache
def processors(device: torch.device) -> int:
    """SMs of `device`; under the interpreter a few, so that sums are split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def parts(tile: Tile, tiles: int, blocks: int, device: torch.device) -> int:
    """Over how many programs the `blocks` of the summed dimension are split, four blocks each at the least."""
    wanted = -(-tile.per_sm * processors(device) // max(tiles, 1))
    count = max(1, min(wanted, blocks // 4))
    return -(-blocks // -(-blocks // count))  # none may be left without a block
