"""Notice that the folder of a run is deleted, moved or replaced while the run works in it.

Writers make missing folders. Without this check a run whose folder is deleted would write its next files into a new
folder of the same name and end as if all were there.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from qarl.checkpoint.storage import StorageError


class RunFolder:
    """The folder at `path`, which exists. It is held open, so that no other folder gets its number from the system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def is_lost(self) -> bool:
        """Whether `path` is no longer this folder."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return True

    @property
    def moved_to(self) -> Path | None:
        """Where the folder is now. None if it was deleted, or if the system does not say."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            same = os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return None
        return path if same else None

    def check(self) -> None:
        """Raise StorageError if `path` is no longer this folder."""
        if self.is_lost:
            replaced = "; another folder has its name now" if self.path.exists() else ""
            raise StorageError(
                f"the run folder {self.path} was deleted or moved during the run",
                why=f"the metrics and checkpoints of the run were in it{replaced}",
                fix="if it was moved, move away what has its name now, then move it back and repeat the command, which "
                "resumes from its newest checkpoint; if it was deleted, train again",
            )
