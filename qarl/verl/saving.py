"""When a verl run saves by time, and what its checkpoints replace.

verl saves every `trainer.save_freq` steps and, at a positive frequency, after the last step (`PPOTrainer.fit`). These
checkpoints stay. `trainer.save_minutes` adds those of `qarl.trainer.checkpoints` (`Saving`): a file `BY_TIME` marks
them in their folders, so that a resumed run, too, knows which one the next replaces. With
`trainer.max_actor_ckpt_to_keep` verl removes old checkpoints of both kinds itself, but not those from before a resume,
which it does not know. `Saving` removes these.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from qarl.checkpoint.read_weights import step_of, what_is_missing, whole_and_torn
from qarl.checkpoint.storage import StorageError, remove_folder

BY_TIME = "saved_by_time"
QUEUE = "transfer_queue"
"""verl's folder in a checkpoint for prompts and responses that wait, if engines sample while the trainer updates."""
HAS_QUEUE = "has_queue"
"""File that says that a checkpoint is complete only with `QUEUE`, which verl writes last and does not miss."""
UNFINISHED = "qarl/unfinished"
"""Metric that marks a line of verl's log, written before the checkpoint of its step (`qarl.verl.saved_rows`)."""

_log = logging.getLogger("qarl.verl")


class Saving:
    """`trainer`: the section `trainer` of verl's config. Its key `save_minutes` is QaRL's."""

    def __init__(self, trainer: Any) -> None:
        self._freq, self._seconds = trainer.save_freq, 60 * trainer.get("save_minutes", -1)
        self._last = trainer.get("total_training_steps")
        keep = trainer.get("max_actor_ckpt_to_keep")
        self._keep = keep if keep and keep > 0 else None  # verl keeps all at 0 and below
        begins = (
            trainer.get("resume_from_path") if trainer.get("resume_mode") == "resume_path" else None
        )
        self._begins = Path(begins).resolve() if begins else None
        self._checkpoints = Path(trainer.default_local_dir)
        self.begin()

    def begin(self) -> None:
        """Count the minutes from now."""
        self._since = time.monotonic()

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to save after `step` what verl does not save. `last`: whether the run ends with this step. A
        run that has a checkpoint by time replaces it at its end."""
        if self._freq > 0 and (last or step % self._freq == 0):
            return False
        if last:
            return bool(self._passing())
        return 0 < self._seconds <= time.monotonic() - self._since

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, and mark it if the next checkpoint replaces it."""
        folder = self._checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._freq <= 0 or (step % self._freq and step != self._last):
            (folder / BY_TIME).touch()
        return folder

    def queue_folder(self, step: int) -> Path:
        """Return the folder that `folder` returns, and mark that its checkpoint has a queue."""
        folder = self.folder(step)
        (folder / HAS_QUEUE).touch()
        return folder

    def saved(self, folder: Path) -> None:
        """Remove the checkpoints that the complete checkpoint in `folder` replaces. Log a warning if that fails."""
        self.begin()
        if what_is_missing(folder) is not None:
            return
        replaced = self._surplus(folder, self._keep) if self._keep else self._passing()
        try:
            for other in replaced:
                # A repeated command begins again from the checkpoint that resume_from_path names.
                if (
                    step_of(other) < step_of(folder)
                    and other.resolve() != self._begins
                    and not other.is_symlink()
                ):
                    remove_folder(other)
        except StorageError as error:
            _log.warning("an old checkpoint stays, training continues: %s", error)

    def _surplus(self, folder: Path, keep: int) -> list[Path]:
        """Return the complete checkpoints before the newest `keep` ones up to that in `folder`. verl itself removes
        those that this process has written."""
        whole, _ = whole_and_torn(self._checkpoints)
        steps = sorted(step for step in whole if step <= step_of(folder))
        return [whole[step] for step in steps[:-keep]]

    def _passing(self) -> list[Path]:
        return [
            mark.parent
            for mark in self._checkpoints.glob(f"global_step_*/{BY_TIME}")
            if step_of(mark.parent)
        ]
