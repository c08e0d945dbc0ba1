"""scripts/without_amx.py: what a script and a module see under it. Without AMX in the CPU only arguments are tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

CODE = """
import os, sys, torch
print(__name__, sys.argv[1:], torch.cpu._is_amx_tile_supported(), os.environ["ONEDNN_MAX_CPU_ISA"])
"""


@pytest.mark.parametrize("how", [["probe.py"], ["-m", "probe"]], ids=["script", "module"])
def test_what_runs_sees_no_amx_and_its_own_arguments(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(CODE)
    command = [sys.executable, str(ROOT / "scripts" / "without_amx.py"), *how, "--a", "b"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[0] == "__main__ ['--a', 'b'] False AVX512_CORE_BF16"


def test_a_call_without_a_script_says_how_to_call_it() -> None:
    found = subprocess.run([sys.executable, str(ROOT / "scripts" / "without_amx.py")], capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.startswith("usage:")
