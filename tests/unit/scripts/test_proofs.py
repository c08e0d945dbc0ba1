"""benchmarks/proofs: rows that are written and continued, figures that are compared, and verdicts that can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proofs import runs
from benchmarks.proofs.__main__ import parameters
from benchmarks.proofs.harness import Record, differences, rows_of
from benchmarks.proofs.registry import proofs


def test_a_result_is_written_row_by_row_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    record = Record(path, "the command")
    assert record.wants("a") and not record.ok
    record.add("a", {"x": 1})
    assert not record.wants("a") and record.ok
    again = Record(path, "the command", only="b|c")
    assert not again.wants("a") and again.wants("b") and not again.wants("d")
    again.add("b", {"x": 2}, ok=False)
    document = json.loads(path.read_text())
    assert list(document["rows"]) == ["a", "b"] and not again.ok
    assert {"date", "commit", "cpu", "versions", "amx_tiles"} <= set(document) and document["command"] == "the command"
    assert Record(path, "", again=True).wants("a")


def test_older_results_are_read() -> None:
    rows = [{"kind": "dense", "scheme": "fp8"}]
    named = {"dense | fp8": rows[0]}
    assert rows_of(rows, ("kind", "scheme")) == rows_of({"date": "", "rows": rows}, ("kind", "scheme")) == named
    assert rows_of({"results": named}) == rows_of({"runs": named}) == named


def test_what_differs() -> None:
    old = {"ok": True, "mean": 1e-3, "seconds": 3.0, "count": 7, "steps": [{"max": 0.0}]}
    assert list(differences(old, old | {"seconds": 9.0, "mean": 1.4e-3, "new": 1})) == []
    found = differences(old, old | {"ok": False, "mean": 3e-3, "count": 8, "steps": [{"max": 1e-9}]})
    assert [line.partition(":")[0] for line in found] == ["count", "mean", "ok", "steps[0].max"]


def test_parameters_are_those_of_the_function() -> None:
    found = parameters(proofs()["publish_stress"], ["publishes=7", "schemes=w4a16,fp8"])
    assert found == {"publishes": 7, "schemes": ("w4a16", "fp8")}
    with pytest.raises(SystemExit, match="no parameter seed; it has schemes, publishes, sets"):
        parameters(proofs()["publish_stress"], ["seed=1"])


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.4] * 20, None),
        ([0.4] * 5 + [0.0] * 5, 8),  # means of five: 0.4, 0.32, 0.24, 0.16
        ([0.4] * 5 + [0.2] * 20, None),  # exactly half is not below half
        ([0.1] * 10 + [0.4] * 10 + [0.15] * 10, 25),  # the peak counts, not the start: 0.2 at step 24, 0.15 at 25
    ],
)
def test_when_a_reward_falls(rewards: list[float], step: int | None) -> None:
    history = [{"step": i, "critic/score/mean": value} for i, value in enumerate(rewards, 1)]
    assert runs.fell_at(history) == runs.seen(history)["reward_fell_at_step"] == step
