"""The limits of the two scripts over whole verl runs: every figure of theirs can make them fail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import verl_runs_check
import verl_two_runs_check
from verl_runs_check import CASES

HEALTHY = {
    "mismatch/abs_mean": 0.0,
    "mismatch/abs_max": 0.0,
    "mismatch/over_limit": 0.0,
    "rollout/preemptions": 5.0,
    "response_length/mean": 50.0,
}
REFUSAL = "\nerror: trainer and engine disagree: mean |δ| between trainer and engine is 7 nats per token\n  where: x"
EXACT, FEW, OTHER = "exact_two_ranks", "exact_preempted", "other_norm"


def verdict(monkeypatch: pytest.MonkeyPatch, name: str, code: int, text: str, steps: list[dict[str, Any]]) -> bool:
    entries = [{"step": i + 1} | step for i, step in enumerate(steps)]
    monkeypatch.setattr(verl_runs_check, "start", lambda *args: (code, text, entries))
    return bool(verl_runs_check.result(name, CASES[name], Path())["ok"])


@pytest.mark.parametrize(
    ("name", "code", "text", "steps", "ok"),
    [
        (EXACT, 0, "", [HEALTHY] * 2, True),
        (EXACT, 0, "", [HEALTHY], False),
        (EXACT, 1, "", [HEALTHY] * 2, False),
        (EXACT, 0, "", [HEALTHY, HEALTHY | {"mismatch/abs_max": 1e-7}], False),
        ("linears", 0, "", [HEALTHY, HEALTHY | {"mismatch/abs_max": 1e-7}], True),
        ("linears", 0, "", [HEALTHY, HEALTHY | {"mismatch/abs_mean": 0.16}], False),
        ("linears", 0, "", [HEALTHY, HEALTHY | {"mismatch/over_limit": 1.0}], False),
        (FEW, 0, "", [HEALTHY] * 2, True),
        (FEW, 0, "", [HEALTHY, HEALTHY | {"rollout/preemptions": 0.0}], False),
        (OTHER, 2, REFUSAL, [], True),
        (OTHER, 2, "\nerror: something else", [], False),
        (OTHER, 2, REFUSAL, [HEALTHY], False),
        (OTHER, 0, "", [HEALTHY] * 2, False),
        ("model", 2, REFUSAL, [], False),
    ],
)
def test_one_run(monkeypatch, name, code, text, steps, ok):
    assert verdict(monkeypatch, name, code, text, steps) == ok


@pytest.mark.parametrize(
    ("code", "largest", "steps", "ok"),
    [(0, 0.0, 2, True), (1, 0.0, 2, False), (0, 1e-7, 2, False), (0, 0.0, 1, False), (0, 0.0, 0, False)],
)
def test_two_runs(monkeypatch, tmp_path, code, largest, steps, ok):
    entry = {"mismatch/abs_max": largest, "timing_s/publish": 0.1}
    monkeypatch.setattr(verl_two_runs_check, "read_metrics", lambda folder: [entry] * steps)
    args = argparse.Namespace(root=tmp_path, steps=2)
    assert verl_two_runs_check.result("first", code, args)["ok"] == ok


def test_every_case_has_its_run():
    """In the committed files, each with all of its cases."""
    pairs = {name for name in CASES if name.startswith("pair_")}
    for file, cases in (("verl_pairs_cpu", pairs), ("verl_runs_cpu", set(CASES) - pairs)):
        report = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
        assert set(report["runs"]) == cases and all(run["ok"] for run in report["runs"].values()), file
