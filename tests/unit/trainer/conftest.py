"""The inputs of a run that a test interrupts, changes and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ends import write_run
from interrupted_runs import write_inputs


@pytest.fixture
def run_folder(tmp_path: Path, pristine_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with run.yaml and all that it reads."""
    monkeypatch.chdir(tmp_path)
    write_inputs(pristine_model)
    return tmp_path


@pytest.fixture
def train(
    startable_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`qarl train` of a run with one data source and a stand-in (`local_ends`). Returns the exit code and what it
    printed."""
    from local_ends import Trainer  # these import PyTorch

    from qarl.train import main
    from qarl.trainer import loop

    monkeypatch.setattr(loop, "LocalTrainer", Trainer)
    settings = write_run("one source")

    def run(*overrides: str) -> tuple[int, str]:
        code = main(["config=run.yaml", *settings, *overrides])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return code, printed.out + printed.err

    return run
