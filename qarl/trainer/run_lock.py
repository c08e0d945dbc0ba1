"""The lock of a run folder, which allows only one process at a time in it.

The system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import UserError


@contextmanager
def lock_run(run_dir: Path, *, create: bool = False) -> Iterator[bool]:
    """Hold the run folder's lock and yield True. If the folder cannot be used or cannot be locked, yield False.
    Raise UserError if another process holds the lock."""
    try:
        if create:
            run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / ".lock").open("a")
    except OSError:
        # Writing the config comes next, and its error says what is wrong with the folder.
        yield False
        return
    with file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(run_dir) from error
        except OSError:
            locked = False
        yield locked


def check_free(run_dir: Path) -> None:
    """Raise UserError if another process works in `run_dir`. No file is changed."""
    try:
        with (run_dir / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _busy(run_dir) from error
    except OSError:
        pass


def _busy(run_dir: Path) -> UserError:
    return UserError(
        f"another process is working on the run {run_dir.name!r}",
        where=str(run_dir),
        why="two runs that write to one folder would damage each other's files",
        fix="wait for it, stop it, or choose a different name=...",
    )
