"""When QaRL's trainer for verl saves a checkpoint by time, and which of these the next one replaces.

verl saves every `trainer.save_freq` steps and, at a positive frequency, after the last step (`PPOTrainer.fit`). These
checkpoints stay. `trainer.save_minutes` adds those of `qarl.trainer.checkpoints`: a file `BY_TIME` marks them in their
folders, so that a resumed run, too, knows which one the next replaces. With `trainer.max_actor_ckpt_to_keep` verl
removes old checkpoints of both kinds itself.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from qarl.checkpoint.open import step_of, what_is_missing
from qarl.checkpoint.storage import StorageError, remove_folder

_log = logging.getLogger("qarl.verl.plugin")

BY_TIME = "saved_by_time"


class Saving:
    """`trainer`: the section `trainer` of verl's config. Its key `save_minutes` is QaRL's."""

    def __init__(self, trainer: Any) -> None:
        self._freq, self._seconds = trainer.save_freq, 60 * trainer.get("save_minutes", -1)
        self._last = trainer.get("total_training_steps")
        self._keep = trainer.get("max_actor_ckpt_to_keep")
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

    def saved(self, folder: Path) -> None:
        """Remove the checkpoint that the complete checkpoint in `folder` replaces. Log a warning if that fails."""
        self.begin()
        if self._keep is None and what_is_missing(folder) is None:
            for other in self._passing():
                if step_of(other) < step_of(folder):
                    try:
                        remove_folder(other)
                    except StorageError as error:
                        _log.warning("an old checkpoint stays, training continues: %s", error)

    def _passing(self) -> list[Path]:
        return [mark.parent for mark in self._checkpoints.glob(f"global_step_*/{BY_TIME}") if step_of(mark.parent)]
