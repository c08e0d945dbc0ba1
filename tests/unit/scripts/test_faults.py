"""benchmarks/faults.py: every fault has its place in the tree."""

from __future__ import annotations

from checkout import ROOT

from benchmarks import faults


def test_every_fault_has_its_place_and_its_test() -> None:
    found = faults.faults()
    assert 40 <= len(found) <= 60 and all(fault.breaks for fault in found)
    assert [fault.name for fault in found if fault.place(ROOT) is None] == [], "these faults are stale"
    assert [fault.name for fault in found if not (ROOT / fault.test.split()[0]).is_file()] == []
    for fault in found:
        compile((fault.place(ROOT) or (ROOT, ""))[1], fault.name, "exec")
