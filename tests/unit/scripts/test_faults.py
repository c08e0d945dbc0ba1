"""benchmarks/faults.py: every fault has its place in the tree, and the runner tells what the tests notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT

from benchmarks import faults
from benchmarks.faults import Fault


def test_every_fault_has_its_place_and_its_test() -> None:
    found = faults.faults()
    assert 40 <= len(found) <= 60 and all(fault.breaks for fault in found)
    assert [fault.name for fault in found if fault.place(ROOT) is None] == [], "these faults are stale"
    assert [fault.name for fault in found if not (ROOT / fault.test.split()[0]).is_file()] == []
    for fault in found:
        compile((fault.place(ROOT) or (ROOT, ""))[1], fault.name, "exec")


@pytest.mark.parametrize(
    ("old", "said"), [("a + b", "noticed by test_it.py::test_it"), ("2 * a", "NOT NOTICED"), ("a - b", "stale")]
)
def test_what_the_tests_say_of_a_fault(tmp_path: Path, old: str, said: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/thing.py").write_text("def add(a, b):\n    return a  +  b\n\n\ndef double(a):\n    return 2 * a\n")
    (tmp_path / "test_it.py").write_text("from lib.thing import add\n\n\ndef test_it():\n    assert add(1, 2) == 3\n")
    before = (tmp_path / "lib/thing.py").read_text()
    fault = Fault("x.y", "lib", old, "a * 7", "test_it.py", "sums")
    assert faults.verdict(fault, tmp_path).startswith(said)
    assert (tmp_path / "lib/thing.py").read_text() == before
