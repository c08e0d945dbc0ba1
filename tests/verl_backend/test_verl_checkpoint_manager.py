"""verl's own manager of checkpoint engines publishes by the engine `qarl`, between Ray's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

pytest.importorskip("verl")
pytest.importorskip("ray")

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_the_actor_asks_no_server_that_waits_for_its_tensors(tmp_path: Path) -> None:
    """verl has both sides at work at once. The publishes take changes where they can, and one that fails in the engine
    is followed by a full one."""
    program = [sys.executable, "-W", "ignore", str(ROOT / "tests/support/verl_separate.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 5, run.stderr[-3000:]
    assert [one["error"] == "" for one in found] == [True, True, False, True, True], found
    assert "no memory" in found[2]["error"] and found[2]["version"] is None
    assert [one["version"] for one in found if not one["error"]] == [1, 2, 4, 5]
    assert all(one["equal"] for one in found if not one["error"])
    assert [one["delta"] for one in found] == [False, True, True, False, True]
    assert max(one["seconds"] for one in found) < 15, "less than the time limit of a question to the servers"
