"""Turns on a host: runs whose publishes would meet in one socket publish one after the other.

Each process of a run that has its turn holds a locked file. The system frees the lock if the process dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from qarl.errors import UserError

FOLDER = Path("/tmp")
"""Where the files are, for all runs of a host. TMPDIR may differ between runs."""
_POLL_SECONDS = 0.02

_numbers = count()


@contextmanager
def turn_on_host(run: str, *, seconds: float, limit: str) -> Iterator[None]:
    """Reserve this host for `run`. Processes of one run share the turn. Processes of other runs wait.

    `limit`: a part of the error's advice, which says what sets the time limit.

    Raise UserError if the turn does not come within `seconds`, because a process of another run is stopped or stuck."""
    folder = FOLDER / f"qarl-publish-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + seconds
    owner = run.replace("/", "_")
    holder = _try_turn(folder, owner)
    while isinstance(holder, Path):
        if time.monotonic() > deadline:
            raise UserError(
                f"another run has blocked publishing on this host for {seconds:g} s",
                where=str(holder),
                why="the process in its name (RUN.PROCESS.NUMBER.holder) is stopped or stuck in a publish; runs on one "
                "host publish one after the other",
                fix=f"continue or end that process ({limit}), then run the same command again",
            )
        time.sleep(_POLL_SECONDS)
        holder = _try_turn(folder, owner)
    try:
        yield
    finally:
        Path(holder.name).unlink(missing_ok=True)
        holder.close()


def _try_turn(folder: Path, run: str) -> IO[str] | Path:
    """Return the file in `folder` that a process of another run has locked. Without one, lock and return this process's
    file. Locks are only tried, never waited for, because their process may be stopped."""
    with (folder / "guard").open("w") as guard:
        if not _lock(guard):
            return Path(guard.name)
        for path in folder.glob("*.holder"):
            if not path.name.startswith(f"{run}."):
                with suppress(FileNotFoundError), path.open("r+") as file:
                    if not _lock(file):
                        return path
                    path.unlink()  # its process has died
        # The number tells files of one process apart: a traceback may keep an earlier publish alive.
        holder = (folder / f"{run}.{os.getpid()}.{next(_numbers)}.holder").open("w")
        _lock(holder)
        return holder


def _lock(file: IO[str]) -> bool:
    """Try to lock an open file. Return whether this process has the lock now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
