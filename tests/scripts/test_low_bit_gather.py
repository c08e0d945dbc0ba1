"""scripts/low_bit_gather.py, and the promises that its committed results keep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "low_bit_gather_cpu.json"
CASES = {f"{kind} {scheme}" for kind in ("dense", "experts") for scheme in ("w4a16", "w8a8", "fp8")}


def check_equal(case: dict[str, Any]) -> None:
    """One case of `equal`: by number of ranks."""
    assert len({found["logits"] for found in case.values()}) == 1
    for world, found in case.items():
        assert found["gradient_apart"] <= 2**-22, "order of FP32 sums"
        if world != "1":
            assert found["of_bf16"] == pytest.approx(found["formula"], rel=0.01)


def test_equality_and_bytes_on_the_wire_in_the_results() -> None:
    found = json.loads(RESULTS.read_text())["equal"]
    assert found.keys() == CASES
    for case in found.values():
        assert case.keys() == {"1", "2", "3", "4"}
        check_equal(case)


@pytest.mark.slow
def test_the_script_measures_again(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    given = ["--what", "equal", "--kinds", "experts", "--schemes", "w4a16", "--json", str(path)]
    subprocess.run([sys.executable, str(ROOT / "scripts" / "low_bit_gather.py"), *given], check=True, timeout=500)
    (case,) = json.loads(path.read_text())["equal"].values()
    assert case.keys() == {"1", "2", "3", "4"}
    check_equal(case)
