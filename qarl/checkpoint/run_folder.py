"""The folder of a run: whether it holds one, and how an earlier one makes room."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from qarl.checkpoint.storage import CHECKPOINTS
from qarl.errors import UserError

METRICS_FILE = "metrics.jsonl"
EXPORT = "export"
"""Folder of the final model in the run folder."""


def fresh_run_dir(run_dir: Path) -> None:
    """Move an earlier run out of the way, to `NAME.1`, `NAME.2`, ...: two runs never share a metrics file.

    A folder without metrics (of a dry run, or a run that was refused) is used as it is.
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
            fix="choose another name=... or output_dir=...",
        ) from error
    print(f"note: {run_dir} held an earlier run, which is now in {target}", file=sys.stderr)


def holds_a_run(run_dir: Path) -> bool:
    return (run_dir / METRICS_FILE).exists() or (run_dir / CHECKPOINTS).exists()


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / CHECKPOINTS
