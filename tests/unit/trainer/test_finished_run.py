"""A repeated command of a finished run trains again: what else may have been meant is said, with words that do it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_state import interrupted_run
from engine_helpers import config
from interrupted_runs import interrupted, record, run_config

from qarl.checkpoint.storage import write_json
from qarl.trainer.resume import open_run
from qarl.verl.resume import find_verl_start, open_verl_run


def finished(folder: Path, *overrides: str) -> Path:
    """A finished run of four steps with an export, in a folder whose name has a space."""
    run = interrupted_run(config(folder / "my runs", *overrides), 2, 4, finished=True)
    summary = json.loads((run / "summary.json").read_text())
    write_json(run / "summary.json", summary | {"checkpoint": "/elsewhere/old/export"})
    (run / "export").mkdir()
    (run / "export" / "config.json").touch()
    return run


def note_of(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    with open_run(config(folder / "my runs", *overrides)):
        pass
    return capsys.readouterr().err


@pytest.mark.usefixtures("in_the_checkout")
def test_an_export_that_was_deleted_can_be_written_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = "trainer.total_training_steps=4"
    run = finished(tmp_path, steps)
    shutil.rmtree(run / "export")
    note = note_of(tmp_path, capsys, steps)
    assert "its export is not there any more" in note
    assert f"`qarl export 'run={run}.1' step=4 output=FOLDER`" in note
    assert (tmp_path / "my runs" / f"{run.name}.1" / "checkpoints" / "step_4").is_dir()


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_lacks_nothing_is_moved_aside_without_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saves: bool
) -> None:
    """The folder may have been moved, so the export counts by its name. And not all runs write one."""
    run = finished(tmp_path, "trainer.total_training_steps=4")
    if not saves:
        summary = json.loads((run / "summary.json").read_text())
        del summary["checkpoint"]
        write_json(run / "summary.json", summary)
        shutil.rmtree(run / "export")
    printed = note_of(tmp_path, capsys, "trainer.total_training_steps=4")
    assert "export" not in printed and "resume from its end" not in printed


def test_a_finished_run_of_verl_has_the_same_notes(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = run_config("verl", "trainer.total_training_steps=20")
    interrupted(longer, record(longer))
    write_json(longer.run_dir / "summary.json", {"finished": True, "checkpoint": "runs/bad/export"})
    with open_verl_run(longer, record(longer)) as step:
        assert step == 0
    note = capsys.readouterr().err
    path = note.rpartition("trainer.resume_from_path=")[2].split()[0]
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    again = run_config("verl", "trainer.total_training_steps=20", *words)
    assert find_verl_start(again, record(again))[0] == 2
