"""benchmarks/faults.py: every fault has its place in the tree."""

from __future__ import annotations

from checkout import ROOT

from benchmarks import faults


def test_every_fault_has_its_place_and_its_test() -> None:
    listed = faults.faults()
    assert len(listed) >= 60 and all(fault.breaks for fault in listed)
    assert [fault.name for fault in listed if fault.place(ROOT) is None] == [], (
        "these faults are stale"
    )
    assert [fault.name for fault in listed if not (ROOT / fault.test.split()[0]).is_file()] == []
    for fault in listed:
        compile((fault.place(ROOT) or (ROOT, ""))[1], fault.name, "exec")
