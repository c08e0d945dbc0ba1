"""The checkpoint of the best evaluation (`trainer.save_best`).

It is one of the run's checkpoints, so a run can resume from it, and `qarl export` and `qarl eval` take its step, or
step=best. It is kept until a better one is written, whatever else removes old checkpoints. Every checkpoint records
which one was the best when it was written, so a run that resumes from an earlier step forgets the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qarl.checkpoint.best_step import FILE
from qarl.checkpoint.resumable import Checkpoint
from qarl.checkpoint.storage import write_json
from qarl.metrics.validation import MEAN

STATE = "best"
"""Key of a checkpoint's state, with the best checkpoint of that time."""


@dataclass(frozen=True)
class Best:
    """Step and `val/accuracy` of the best evaluation of a run that has a checkpoint."""

    step: int
    accuracy: float

    def folder(self, checkpoints: Path) -> Path:
        return checkpoints / f"step_{self.step}"

    def write(self, run_dir: Path, checkpoints: Path) -> None:
        """Write `FILE` to the run folder."""
        name = str(self.folder(checkpoints).relative_to(run_dir))
        write_json(run_dir / FILE, {**asdict(self), "checkpoint": name})

    @classmethod
    def of(cls, checkpoint: Checkpoint, checkpoints: Path) -> Best | None:
        """Return what `checkpoint` records, if its folder is still among `checkpoints`."""
        saved: Mapping[str, Any] | None = checkpoint.state.get(STATE)
        if saved is None:
            return None
        best = cls(int(saved["step"]), float(saved["accuracy"]))
        return best if best.folder(checkpoints).is_dir() else None


def rewrite(best: Best | None, run_dir: Path, checkpoints: Path) -> None:
    """Let `FILE` say what a resumed run knows: the `best` of its checkpoint, or nothing."""
    if best is None:
        (run_dir / FILE).unlink(missing_ok=True)
    else:
        best.write(run_dir, checkpoints)


def better(metrics: Mapping[str, float], step: int, best: Best | None) -> Best | None:
    """Return this step if its evaluation is better than the `best`, else None. Of equal ones the first stays."""
    accuracy = metrics.get(MEAN, math.nan)
    if math.isnan(accuracy) or (best is not None and accuracy <= best.accuracy):
        return None
    return Best(step, accuracy)
