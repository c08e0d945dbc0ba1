"""benchmarks/proofs: rows that are written and continued, and figures that are compared."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.proofs.harness import Record, differences


def test_a_result_is_written_row_by_row_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    record = Record(path, "the command")
    assert record.wants("a") and not record.ok
    record.add("a", {"x": 1})
    assert not record.wants("a") and record.ok
    again = Record(path, "the command", only="b|c")
    assert not again.wants("a") and again.wants("b") and not again.wants("d")
    again.add("b", {"x": 2}, ok=False)
    document = json.loads(path.read_text())
    assert list(document["rows"]) == ["a", "b"] and not again.ok
    assert {"date", "commit", "cpu", "versions", "amx_tiles"} <= set(document) and document[
        "command"
    ] == "the command"
    assert Record(path, "", again=True).wants("a")


def test_what_differs() -> None:
    old = {"ok": True, "mean": 1e-3, "seconds": 3.0, "count": 7, "steps": [{"max": 0.0}]}
    assert list(differences(old, old | {"seconds": 9.0, "mean": 1.4e-3, "new": 1})) == []
    lines = differences(
        old, old | {"ok": False, "mean": 3e-3, "count": 8, "steps": [{"max": 1e-9}]}
    )
    assert [line.partition(":")[0] for line in lines] == ["count", "mean", "ok", "steps[0].max"]
