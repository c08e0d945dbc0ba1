"""Writes the quantization of a run into the checkpoints of TRL's trainer, and compares it on a resume.

transformers resumes from a folder with any settings. With another scheme the rest of the run would train and sample
from another policy than its beginning, and no metric would show it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from qarl.checkpoint.storage import write_json
from qarl.errors import UserError
from qarl.trl.config import RUN_KEYS, QaRLConfig

FILE = "qarl.json"
COMPARED = [
    name
    for key, name in RUN_KEYS.items()
    if key == "optim.master_dtype" or (key.startswith("quant.") and key != "quant.mismatch_limit")
]


def write_settings(folder: str, args: QaRLConfig) -> None:
    """Write the fields `COMPARED` of `args` to a checkpoint."""
    write_json(Path(folder) / FILE, {name: getattr(args, name) for name in COMPARED})


def check_resume(asked: str | bool | None, args: QaRLConfig) -> None:
    """Raise UserError if the checkpoint that `train(resume_from_checkpoint=asked)` reads has other settings.

    A checkpoint that is missing is left to transformers, which refuses it."""
    folder = get_last_checkpoint(args.output_dir) if asked is True else asked
    if not folder or not Path(folder).is_dir():
        return
    try:
        saved: dict[str, Any] = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"the checkpoint does not say how its run was quantized: {FILE} is missing or unreadable",
            where=str(folder),
            why="QaRLTrainer writes this file, and compares it so that a run does not change its scheme by mistake",
            fix="start a new run from its weights: pass this folder as model, without resume_from_checkpoint",
        ) from None
    changed = {name: getattr(args, name) for name in COMPARED if saved.get(name) != getattr(args, name)}
    if changed:
        raise UserError(
            f"the run cannot resume from {folder}: it was quantized differently",
            where="; ".join(f"{name} was {saved.get(name)!r}, now {value!r}" for name, value in changed.items()),
            why="the rest of the run would be a different experiment than its beginning",
            fix=f"set {', '.join(f'{name}={saved.get(name)!r}' for name in changed)}; or start a new run, with "
            "another output_dir",
        )
