"""`scripts/tensor_parallel.py`: one row of its table, with an engine that two processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from cpu_features import needs_w4a16_cpu

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_w4a16_cpu]


def test_a_row_has_the_mismatch_of_every_level(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "scripts" / "tensor_parallel.py"), "--output", str(output)]
    command += ["--configs", "quickstart.yaml", "--schemes", "w4a16", "--workers", "2", "--prompts", "8"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=600)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["workers"] == 2 and row["exact_becomes"] == "linears" and row["tokens"] > 8
    mean = {level: found["abs_mean"] for level, found in row["mismatch"].items()}
    assert 0 < mean["model"] < mean["off"] and 0 < mean["linears"] < mean["off"]
