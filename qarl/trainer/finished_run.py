"""What a run says if a finished run has its name: the same command moves that aside and trains from the beginning.

Whoever repeats the command of a finished run may want something else: more steps, or an export that was lost. Neither
needs the steps again, if there is a checkpoint, so the run says how. It goes on all the same, because the command is
also that of a new run.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from qarl.checkpoint.read_weights import newest_checkpoint
from qarl.checkpoint.storage import SUMMARY_FILE, free_name
from qarl.config import Config


def notes_of_finished(config: Config) -> tuple[str, ...]:
    """Return how to go on from the finished run in the folder of `config` instead of starting fresh.

    Nothing, if the run has no checkpoint, or the command can only mean a new run."""
    newest = newest_checkpoint(config.run_dir)
    if newest is None:
        return ()
    step, folder = newest
    moved = free_name(config.run_dir)
    begins = f"{config.name} is finished, so this run starts fresh, and the finished one moves to {moved}"
    if step < config.trainer.total_training_steps:
        checkpoint = moved / folder.relative_to(config.run_dir)
        path = shlex.quote(f"trainer.resume_from_path={checkpoint}")
        return (
            f"{begins}; to resume from its end instead: trainer.resume_mode=resume_path {path}",
        )
    if not _lacks_its_export(config.run_dir):
        return ()
    command = shlex.join(["qarl", "export", f"run={moved}", f"step={step}"])
    return (
        f"{begins}; its export is not there any more: `{command} output=FOLDER` writes it again without training",
    )


def _lacks_its_export(run_dir: Path) -> bool:
    """Return whether the summary in `run_dir` names an export that was moved or deleted meanwhile."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
        export = run_dir / Path(summary["checkpoint"]).name
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return not (export / "config.json").is_file()
