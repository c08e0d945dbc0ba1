"""The step of the best evaluation of a run, which `qarl export` and `qarl eval` take as `step=best`.

`qarl.trainer.best_checkpoint` writes the file. It is not read from the checkpoints, because a run that has resumed from
an earlier step forgets the later ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt

from qarl.errors import UserError

FILE = "best.json"
CheckpointStep = NonNegativeInt | Literal["best"]
"""Type of a key that names the checkpoint of a run."""


def best_step(run: Path) -> int:
    """Return the step that `FILE` in the run folder names. Raise UserError if there is none."""
    try:
        return int(json.loads((run / FILE).read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        why = (
            f"it has no {FILE}, which a run writes with trainer.save_best=true after an evaluation"
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{FILE} cannot be read: {type(error).__name__}: {error}"
    raise UserError(
        f"the run {run} names no best checkpoint", where="step=best", why=why, fix="give step=N"
    )
