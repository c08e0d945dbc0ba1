"""scripts/gpu_check.py: the table of verdicts that it makes of a benchmark's figures, and its limit on each part."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

from qarl.kernels.experts.fused import ReferenceExperts

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check
from gpu_verdicts import BOUNDS, GEMLITE, table, verdicts


def entry(operation: str, m: int, scheme: str, kernel: str, seconds: float, copy: float = 0.5) -> dict[str, Any]:
    return {
        "operation": operation, "layer": "down", "n": 4096, "k": 12288, "m": m, "scheme": scheme, "kernel": kernel,
        "seconds": {"median": seconds}, "share_of_copy": copy, "share_of_bf16_product": 0.25,
    }  # fmt: skip


def verdict(results: list[dict[str, Any]], start: str) -> tuple[str, str]:
    (found,) = (line for line in verdicts(results) if line.bound.startswith(start))
    return found.verdict, found.figure


@pytest.mark.parametrize(
    ("start", "operation", "m", "scheme", "against", "least"),
    [
        ("W4A16, M <= 16: 2.5x", "linear", 16, "w4a16", ("bf16", "bf16"), 2.5),
        ("W4A16, M <= 16: 0.9x", "linear", 1, "w4a16", ("w4a16", "vllm_marlin"), 0.9),
        ("W4A16, M >= 4096", "linear", 4096, "w4a16", ("bf16", "bf16"), 0.9),
        ("W8A8, M >= 4096", "linear", 16384, "w8a8", ("bf16", "bf16"), 1.5),
        ("FP8, M >= 4096", "linear", 4096, "fp8", ("bf16", "bf16"), 1.5),
        ("transposed", "input_gradient", 4096, "w4a16", ("bf16", "bf16"), 0.8),
    ],
)
def test_speeds(start: str, operation: str, m: int, scheme: str, against: tuple[str, str], least: float) -> None:
    mine = entry(operation, m, scheme, "triton", 1.0)
    for ratio, expected in ((least + 0.01, "met"), (least - 0.01, "missed")):
        found, figure = verdict([mine, entry(operation, m, *against, ratio)], start)
        assert found == expected and figure.startswith(f"{ratio:.2f}x")
        assert ("50% of a copy's bytes/s, 25% of the BF16 product's" in figure) == (expected == "missed")
    assert verdict([mine], start)[0] == "not measured"
    assert verdict([entry(operation, m, *against, 1.0)], start) == ("missed", f"{scheme} triton has no figure")
    assert verdict([entry(operation, 512, scheme, "triton", 1.0)], start)[0] == "not measured"


def test_the_fused_figure_stands_beside() -> None:
    results = [entry("input_gradient", 4096, *name, t) for name, t in (
        (("bf16", "bf16"), 1.0), (("w4a16", "triton"), 1.1), (("w4a16", "triton, fused"), 2.0),
    )]  # fmt: skip
    assert verdict(results, "transposed") == ("met", "0.91x (fused: 0.50x)")


def test_quantizers_are_held_to_a_copy() -> None:
    results = [entry("quantize", 0, "w4a16", "triton", 1.0, copy=0.71), entry("quantize", 0, "fp8", "triton", 1.0, 0.6)]
    found = {line.where: line.verdict for line in verdicts(results) if line.bound.startswith("quantize")}
    assert found.pop("down [4096, 12288], w4a16 triton") == "met"
    assert len(found) == 5 and set(found.values()) == {"missed"}  # one too slow, four without a figure


def test_gemlite() -> None:
    def results(*ratios: float) -> list[dict[str, Any]]:
        return [
            entry("linear", m, "w4a16", kernel, seconds)
            for m, ratio in enumerate(ratios, start=1)
            for kernel, seconds in (("triton", 1.0), ("gemlite", ratio))
        ]

    assert verdict(results(1.2, 0.98, 0.5), GEMLITE) == ("met", "on 2 of 3 shapes")
    assert verdict(results(1.2, 0.9), GEMLITE)[0] == "missed"
    assert verdict([], GEMLITE) == ("not measured", "gemlite is not here")


def test_nothing_measured_is_said_for_every_bound() -> None:
    found = verdicts([])
    assert [line.bound for line in found] == [*(bound.text for bound in BOUNDS), GEMLITE]
    assert {line.verdict for line in found} == {"not measured"}
    assert len(table(found).splitlines()) == len(found) + 2


def test_nothing_that_a_part_started_outlives_its_limit(tmp_path: Path) -> None:
    """What a shell waits for, what runs beside it, and what it left behind."""
    late = f"(sleep 1; touch {tmp_path}/beside) & echo started; sh -c 'sleep 1; touch {tmp_path}/waited_for'; true"
    left = f"(sleep 1; touch {tmp_path}/left) & exit 0"
    assert gpu_check._run(["sh", "-c", left], dict(os.environ), 0.3) == ("", None)
    assert gpu_check._run(["sh", "-c", late], dict(os.environ), 0.3) == ("started\n", None)
    time.sleep(1.2)
    assert not list(tmp_path.iterdir())
    assert gpu_check._run(["sh", "-c", "echo wrong; exit 3"], dict(os.environ), 9.0) == ("wrong\n", 3)


def test_a_kernel_that_cannot_take_the_weights_fails_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(gate_up: object, down: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(ReferenceExperts, "prepare", staticmethod(prepare))
    entries = list(gpu_check._expert_checks(torch.device("cpu")))
    assert {entry["kernel"] for entry in entries if entry["operation"] == "prepare experts"} >= {"w4a16 reference"}
    assert not any(entry["good"] for entry in entries if entry["operation"] == "prepare experts")
