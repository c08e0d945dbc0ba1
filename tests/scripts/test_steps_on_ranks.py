"""The promises that the committed results of scripts/steps_on_ranks.py keep."""

from __future__ import annotations

import json

from checkout import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "steps_on_ranks_cpu.json"
CASES = {"dense w4a16", "experts w4a16"}


def test_only_the_order_of_sums_tells_the_number_of_ranks() -> None:
    cases = json.loads(RESULTS.read_text())["runs"]
    assert cases.keys() >= CASES
    for case in cases.values():
        assert {run: set(found) for run, found in case.items()} == {
            "shared": {"1", "2", "4"},
            "reordered": {"1"},
            "unclipped": {"1", "2", "4"},
            "pair": {"1", "2"},
        }
        for found in (*case["pair"].values(), *case["unclipped"].values()):
            assert found["first_differing_step"] is None
        for run in case.values():
            assert all(found["gradient_apart"] <= 2**-22 for found in run.values())
        for found in case["shared"].values():
            assert found["at_the_end"]["codes"] < 0.05 * found["moved"]
            assert found["at_the_end"]["largest"] <= 1
