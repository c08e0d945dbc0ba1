"""The inputs of a run that a test interrupts, changes and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupted_runs import write_inputs


@pytest.fixture
def run_folder(tmp_path: Path, pristine_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with run.yaml and all that it reads."""
    monkeypatch.chdir(tmp_path)
    write_inputs(pristine_model)
    return tmp_path
