"""The lock of a run folder, which allows only one process at a time in it.

It is a lock of the system (flock) on the file `.lock`, held from the start of a command to its end. The system releases
it when the process ends, however it ends. So a file that a killed process or a process of another machine has left is
no lock. The file says which process holds the lock, for the error of another one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from qarl.errors import UserError

_ATTEMPTS = 5
"""`check_free` of another process holds the lock for a moment, too, so a failed attempt is repeated."""
_PAUSE_SECONDS = 0.1

_Identity = tuple[int, int]
"""Device and inode of a lock file, which a renamed folder takes with it."""
_held: dict[_Identity, BinaryIO] = {}
"""The lock files of this process."""


@contextmanager
def lock_run(run_dir: Path) -> Iterator[bool]:
    """Hold the lock of the run folder and yield True. If the folder cannot be used or its disk has no locks, yield
    False.

    A missing folder is created, and removed at the end if nothing else is in it. Where this process holds the lock
    already, the outer block keeps it. Raise UserError if another process holds it."""
    if _identity(run_dir) in _held:
        yield True
        return
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        file = _locked_file(run_dir)
    except OSError:
        # Writing the config comes next, and its error says what is wrong with the folder.
        yield False
        return
    identity = _identity_of(os.fstat(file.fileno()))
    _held[identity] = file
    try:
        yield True
    finally:
        del _held[identity]
        if _identity(run_dir) == identity:
            _remove_unused(run_dir, missing)
        file.close()


def check_free(run_dir: Path) -> None:
    """Raise UserError if another process works in `run_dir`. No file is changed."""
    try:
        with _file(run_dir).open("rb", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _busy(run_dir, _holder(file)) from error
    except OSError:
        pass


def _file(run_dir: Path) -> Path:
    return run_dir / ".lock"


def _locked_file(run_dir: Path) -> BinaryIO:
    """Return the open lock file of `run_dir` with its lock. Raise UserError if another process holds it, and OSError if
    there can be no lock."""
    holder: Mapping[str, Any] = {}
    for _ in range(_ATTEMPTS):
        run_dir.mkdir(parents=True, exist_ok=True)
        file = _file(run_dir).open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            file.close()
            time.sleep(_PAUSE_SECONDS)
            continue
        except OSError:
            file.close()
            raise
        if _identity(run_dir) == _identity_of(os.fstat(file.fileno())):
            _sign(file)
            return file
        file.close()  # another process has removed the folder, or moved it aside
    raise _busy(run_dir, holder)


def _sign(file: BinaryIO) -> None:
    """Write into a lock file which process holds it. Without room on the disk, the lock is held all the same."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder).encode() + b"\n")


def _holder(file: BinaryIO) -> Mapping[str, Any]:
    """Return what `_sign` wrote, or nothing if it cannot be read."""
    with suppress(OSError, ValueError):
        file.seek(0)
        holder = json.loads(file.read())
        if isinstance(holder, dict):
            return holder
    return {}


def _identity(run_dir: Path) -> _Identity | None:
    """Return which file is the lock file of `run_dir` now, or None if there is none."""
    try:
        return _identity_of(_file(run_dir).stat())
    except OSError:
        return None


def _identity_of(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _remove_unused(run_dir: Path, created: Sequence[Path]) -> None:
    """Remove the folders that were `created` for the lock, from `run_dir` upwards, if nothing else is in them."""
    with suppress(OSError):
        if not created or os.listdir(run_dir) != [_file(run_dir).name]:
            return
        _file(run_dir).unlink()
        for folder in created:
            folder.rmdir()


def _forget_locks() -> None:
    """Close the lock files in a forked process, which may outlive the one that holds the locks."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _busy(run_dir: Path, holder: Mapping[str, Any]) -> UserError:
    process = f"process {holder.get('pid', '?')} of host {holder.get('host', '?')}"
    since = holder.get("since", "an unknown time")
    return UserError(
        f"another process is working on the run {run_dir.name!r}",
        where=str(run_dir),
        why=f"{process} has worked in this folder since {since}; two runs that write to one folder would damage each "
        "other's files",
        fix="wait for it, stop it, or choose a different name=...",
    )
