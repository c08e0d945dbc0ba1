"""Check whether the folder of a run contains an earlier run, and move an earlier run aside."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from qarl.checkpoint.storage import CHECKPOINTS
from qarl.console import note
from qarl.errors import UserError

METRICS_FILE = "metrics.jsonl"
EXPORT = "export"
"""Name of the final model's folder in the run folder."""


def fresh_run_dir(run_dir: Path) -> None:
    """Move an earlier run aside, to `NAME.1`, `NAME.2`, ..., so that two runs never share a metrics file.

    A folder without metrics and checkpoints, as after a dry run or a refused run, is not moved.
    """
    if not holds_a_run(run_dir):
        return
    numbered = (run_dir.with_name(f"{run_dir.name}.{number}") for number in itertools.count(1))
    target = next(path for path in numbered if not os.path.lexists(path))
    try:
        run_dir.rename(target)
    except OSError as error:
        raise UserError(
            f"the earlier run in {run_dir} cannot be moved to {target}",
            where="output_dir, name",
            why=error.strerror,
            fix="choose a different name=... or output_dir=...",
        ) from error
    note(f"{run_dir} contained an earlier run, which is now in {target}")


def holds_a_run(run_dir: Path) -> bool:
    return (run_dir / METRICS_FILE).exists() or (run_dir / CHECKPOINTS).exists()


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / CHECKPOINTS
