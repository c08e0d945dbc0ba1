"""Folders on disk that appear whole or not at all, and what is left over of those that did not.

A folder is written beside its place as `NAME.partial-PID`, every file and the folder itself are forced to disk, and
then it is renamed: a kill or a power cut at any moment leaves the whole folder or none. Replacing and removing go
through a rename too (`NAME.old-PID`), so that nothing half removed carries the name. `recover` puts in order what a
killed process left behind; it leaves alone what belongs to a process that is still running. A link is followed: what it
points to is replaced.

Whatever the disk refuses (full, quota, file size limit, read-only) is a `StorageError`, with nothing left behind.

A folder to remove may be a link. If it points to a folder of the same name, somebody moved the folder (to a larger
disk, say), and the moved folder is removed too, to free its space. Any other target stays: a folder of another name,
or a checkpoint of another run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import UserError

_TEMPORARY = re.compile(r"(?P<name>.+)\.(?P<kind>partial|old)-(?P<pid>\d+)")
CHECKPOINTS = "checkpoints"
"""Name of the folder of a run that its checkpoints are in."""
_CLOCK_ERROR = 2.0
"""Seconds: the time of the boot is known to the second."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageError(UserError):
    """The disk did not take what was written; what was there before is untouched."""


@contextmanager
def whole_folder(folder: Path, *, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder to write to, which becomes `folder` at the end, replacing what is there.

    `needed_bytes`: checked before anything is written. After any exception `folder` is as
    it was and nothing is left of the new one.

    Raises:
        StorageError: the disk has no room, or writing failed.
    """
    folder = folder.resolve()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_room(folder, needed_bytes)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        replace_folder(folder, partial)
    except OSError as error:
        raise _storage_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the disk inside into a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise _storage_error(path, error) from error


def check_room(folder: Path, needed_bytes: int) -> None:
    """StorageError if the disk of `folder`, which need not exist, has less than `needed_bytes` free."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise StorageError(
            f"there is no room for {folder}",
            why=f"it takes {needed_bytes / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free",
            fix="free some space, or write to another disk",
        )


def replace_folder(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`; what was there is moved aside first and removed last, or comes back on an error."""
    folder = folder.resolve()
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove `folder` so that a kill halfway leaves none of that name: `recover` would remove the rest.

    Raises OSError if something is left.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    folder.rename(partial)
    _remove(partial, folder.name)


def _remove(folder: Path, name: str) -> None:
    """Remove a folder or a file. Of a link also what it points to, if that is the moved folder `name`."""
    if not folder.is_symlink():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        return
    target = folder.resolve()
    if target.name == name and target.parent.name != CHECKPOINTS and target.is_dir():
        shutil.rmtree(target)
    folder.unlink()


def recover(parent: Path, name: str | None = None, *, alone: bool = False) -> list[str]:
    """Put in order what killed processes left in `parent` (of the folder `name` only, if given); says what was done.

    `alone`: no other process works in `parent`, by a lock; else what a running process may have made is left alone.

    Half-written folders are removed. A folder that was moved aside to be replaced, and whose successor never came, gets
    its name back.
    """
    done = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or name not in (None, match["name"]):
            continue
        if not alone and _in_use(path, int(match["pid"])):
            continue
        if match["kind"] == "old" and not (parent / match["name"]).exists():
            with writing(path):
                path.rename(parent / match["name"])
            done.append(f"{parent / match['name']} was being replaced when the process ended, and is as it was")
            continue
        try:
            _remove(path, match["name"])
            done.append(f"removed {path}, left half-written by a process that ended")
        except OSError as error:
            done.append(f"{path}, left half-written by a process that ended, cannot be removed: {error.strerror}")
    return done


def set_aside(folder: Path, suffix: str) -> Path:
    """Rename `folder` to `FOLDER.SUFFIX`, in place of an earlier one of that name; returns the new path."""
    target = folder.with_name(f"{folder.name}.{suffix}")
    with writing(target):
        replace_folder(target, folder)
    return target


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed. Missing folders are made.

    Raises:
        StorageError: the disk did not take it; what was there is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_use(path: Path, pid: int) -> bool:
    """Whether `path` may be another process's: one of that number runs, and did when the folder was changed last.

    Numbers are used again, in containers soon: a process that started later did not make the folder.
    """
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    started = _started(pid)
    return started is None or path.lstat().st_ctime > started - _CLOCK_ERROR


def _started(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None if the system does not say. It counts from the boot."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(folder: Path, error: OSError) -> StorageError:
    full = error.errno in _FULL
    return StorageError(
        f"{folder} could not be written",
        why=error.strerror or str(error),
        fix="free some space, or raise the quota or the file size limit" if full else "write to another folder or disk",
    )
