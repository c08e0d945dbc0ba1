"""Refuse a run folder in which something of the user has the name of a file or folder that the run writes.

The run would fail at its end, after all its steps, or replace what the user has put there.
"""

from __future__ import annotations

from pathlib import Path

from qarl.checkpoint.export_folder import why_foreign
from qarl.checkpoint.storage import (
    EXPORT,
    METRICS_FILE,
    SUMMARY_FILE,
    checkpoints_dir,
    holds_a_run,
)
from qarl.checks.inputs_record import RECORD_FILE
from qarl.config import Config
from qarl.errors import UserError
from qarl.metrics.tracker import VERSIONS_FILE
from qarl.metrics.warning_log import WARNINGS_FILE
from qarl.report.page import REPORT_FILE
from qarl.report.samples import SAMPLES_FILE

PLOTS = "plots"
_FILES = (
    "config.yaml",
    METRICS_FILE,
    SUMMARY_FILE,
    VERSIONS_FILE,
    RECORD_FILE,
    WARNINGS_FILE,
    SAMPLES_FILE,
    REPORT_FILE,
)


def check_names(config: Config) -> None:
    """Raise UserError if a name that the run of `config` needs in its folder is taken. The run will work in the folder
    as it is: it resumes there, or the folder holds no run."""
    run_dir = config.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        raise _taken(run_dir, "the run makes a folder of this name", "it is a file")
    for name in _FILES:
        if (run_dir / name).is_dir():
            raise _taken(run_dir / name, "the run writes a file of this name", "it is a folder")
    for folder in (checkpoints_dir(run_dir), run_dir / PLOTS, run_dir / "tensorboard"):
        if folder.exists() and not folder.is_dir():
            raise _taken(folder, "the run makes a folder of this name", "it is a file")
    export = run_dir / EXPORT
    if config.trainer.save_final and export.exists() and (why := why_foreign(export)):
        raise _taken(export, "the run exports its model to a folder of this name", why)
    if holds_a_run(run_dir):
        return
    for name in (EXPORT, PLOTS, REPORT_FILE, SAMPLES_FILE, WARNINGS_FILE):
        path = run_dir / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise _taken(path, "the run would write to it", f"no run is in {run_dir}")


def _taken(path: Path, doing: str, why: str) -> UserError:
    return UserError(
        f"{path} is in the way of the run",
        why=f"{doing}, but {why}",
        fix="move it away, or choose a different name=... or output_dir=...",
    )
