"""Folders that TRL has written, for commands that read a run of `qarl train`: say what they are and what to do.

A training with TRL (`qarl.trl`) has transformers' checkpoints, `checkpoint-N` with trainer_state.json, and neither the
config nor the metrics of a run. The names were checked in transformers 5.10 (`trainer_utils.py`, `trainer.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from qarl.errors import UserError

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"


def newest_of_trl(folder: Path) -> Path | None:
    """Return the newest checkpoint of TRL in `folder`, or `folder` itself if it is one, or None."""
    if (folder / _STATE).is_file() and _NAME.fullmatch(folder.absolute().name):
        return folder
    try:
        steps = {
            int(match[1]): path
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name)) and (path / _STATE).is_file()
        }
    except OSError:
        return None
    return max(steps.items())[1] if steps else None


def refuse_trl(folder: Path, where: str, fix: str) -> None:
    """Raise UserError if TRL has written `folder`. `fix`: what to do instead; {newest} stands for its newest
    checkpoint."""
    newest = newest_of_trl(folder)
    if newest is not None:
        raise UserError(
            f"{folder} was written by TRL, and is not a run of qarl train",
            where=where,
            why="TRL's checkpoints are model folders in BF16, without a run's config, metrics and published weights",
            fix=fix.format(newest=newest),
        )
