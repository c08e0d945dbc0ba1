"""scripts/tune_triton.py without a GPU: which tiles it tries, which it refuses, and that it takes the fastest."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import tune_triton
from tune_triton import CLASSES, Machine, best, candidates, rules, tried, wrong

from qarl.kernels.triton import tiles as tables
from qarl.kernels.triton.tiles import Tile

CPU = torch.device("cpu")
STORED = json.loads(tables.PATH.read_text(encoding="utf-8"))["hopper"]


class TileClock:
    """Its seconds of a call depend on the tile that it runs with."""

    def __init__(self, seconds: Callable[[Tile | None], float]) -> None:
        self.seconds = seconds
        self.seen: list[Tile | None] = []

    def timer(self, call: Callable[[], object]) -> tuple[str, Callable[[], float]]:
        call()
        tile = RAN[-1]
        self.seen.append(tile)
        return "graph", lambda: self.seconds(tile)


RAN: list[Tile | None] = []


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tile | None], float]], None]:
    """Replaces the products by one number that depends on the tile."""

    def replace(value: Callable[[Tile | None], float]) -> None:
        def make_call(operation: str, m: int, shape: Any, device: torch.device) -> Any:
            def call(tile: Tile | None) -> torch.Tensor:
                RAN.append(tile)
                return torch.tensor([1.0, value(tile)])

            return call

        monkeypatch.setattr(tune_triton, "make_call", make_call)

    return replace


INVARIANT = [name for name in STORED if name.endswith("_invariant") and STORED[name]]


@pytest.mark.parametrize("operation", INVARIANT)
def test_an_invariant_sum_is_tried_without_splits_and_not_dequantized(operation: str) -> None:
    assert INVARIANT
    for m in CLASSES:
        assert list(candidates(operation, m)), f"nothing to try for {m} rows"
        assert all(tile.per_sm == 0 for tile in candidates(operation, m))
        assert None not in tried(operation, m, CPU)


def test_other_sums_may_be_split_or_dequantized() -> None:
    assert {tile.per_sm for tile in candidates("w4a16", 16)} == {2, 4}
    assert tried("w4a16", 16, CPU)[1] is None


def test_what_is_wrong_with_a_candidate() -> None:
    """One bit of a thousand numbers is wrong for an invariant sum, and 2% for every sum."""
    expected = torch.linspace(1, 2, 1000).bfloat16()
    one_bit = expected.clone()
    one_bit[7] = one_bit[7].view(torch.int16).add(1).view(torch.bfloat16)
    assert wrong(one_bit, expected, exactly=True) == "1 of 1000 numbers have other bits"
    assert wrong(one_bit, expected, exactly=False) is None
    assert "relative error 2" in str(wrong(expected.float() * 1.02, expected, exactly=False))
    nan = torch.full_like(expected, math.nan)
    assert wrong(nan, expected, exactly=True) and wrong(nan, expected, exactly=False)


def test_the_fastest_with_the_same_bits_wins(products: Any) -> None:
    """The fastest tile has another block of K, and so other bits."""
    products(lambda tile: 0.0 if tile is None or tile.BK == 128 else 1e-6)
    clock = TileClock(lambda tile: 1.0 if tile is None else tile.BK / 128 + tile.num_stages / 100)
    tile, means = best("w4a16_invariant", 64, time.monotonic() + 60, Machine(CPU, clock))  # type: ignore[arg-type]  # stands for one
    assert tile is not None and (tile.BK, tile.num_stages) == (128, 3)
    assert means[tile] == pytest.approx(1.03)
    assert clock.seen and all(seen is not None and seen.BK == 128 for seen in clock.seen)


def test_a_table_ends_where_dequantizing_wins_but_an_invariant_one_has_no_end(
    products: Any,
) -> None:
    products(lambda tile: 0.0)
    machine = Machine(CPU, TileClock(lambda tile: 1.0 if tile is None else 2.0))  # type: ignore[arg-type]  # as above
    assert rules("w4a16", time.monotonic() + 60, machine) == []
    table = rules("w4a16_invariant", time.monotonic() + 60, machine)
    assert "max_m" not in table[-1]
