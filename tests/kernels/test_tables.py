"""Which table of tiles a GPU gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from qarl.kernels.triton import tables

NAMES = {
    (8, 0): "ampere",
    (8, 6): "ampere",
    (8, 9): "ampere",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (12, 0): "blackwell_geforce",
    (12, 1): "blackwell_geforce",
}


@pytest.mark.parametrize("capability", NAMES)
def test_each_capability_has_its_table(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert tables.architecture(torch.device("cuda", 0)) == NAMES[capability]


def operand_bytes(operation: str, tile: tables.Tile) -> int:
    """Shared memory of the pipelined operands: BF16 rows by packed int4 (W4A16), or 8 bits by 8 bits."""
    if "w4a16" in operation:
        inner = tile.BN if "backward" in operation else tile.BK
        other = tile.BK if "backward" in operation else tile.BN
        return tile.num_stages * (2 * tile.BM * inner + inner * other // 2)
    return tile.num_stages * tile.BK * (tile.BM + tile.BN)


def test_tiles_for_capability_12_leave_a_quarter_of_99_kilobytes() -> None:
    """The compiler's own figures are in tests/kernels/test_triton.py; this is quick. Every operation has rules."""
    found: dict[str, Any] = tables.tables()["blackwell_geforce"]
    assert found.keys() == tables.tables()["blackwell"].keys()
    for operation, rules in found.items():
        assert rules, operation
        assert max(operand_bytes(operation, rule.tile) for rule in rules) <= 0.75 * 99 * 1024
