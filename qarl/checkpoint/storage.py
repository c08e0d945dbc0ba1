"""Write folders and files that appear only when they are complete, and clean up after killed processes.

A folder is first written as `NAME.partial-PID` beside its final place. Its files are synced to disk, then it is
renamed. So after a kill or a power cut the folder is either complete or absent. To replace or remove a folder, it is
first renamed to `NAME.old-PID`. `recover` cleans up after killed processes.

If the disk refuses to write (full, quota, file size limit, read-only), a `StorageError` is raised and no partial folder
is left.

Replacing a link replaces its target. Removing a link leaves its target alone.

The end of the module has the files of a run folder: JSON, lines of JSON, and what happens to an earlier run.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from qarl.console import note
from qarl.errors import UserError

_TEMPORARY = re.compile(r"(?P<name>.+)\.(?P<kind>partial|old)-(?P<pid>\d+)")
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
EXPORT = "export"
"""Name of the final model's folder in the run folder."""
DAMAGED = object()
"""Stands for the value of a line that has none."""
_OS_ERROR = re.compile(r"os error (\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSING = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)


class StorageError(UserError):
    """The disk refused to write. Existing files and folders are unchanged. `number`: the system's number of the
    error."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.number = number

    def has_cause_of(self, other: BaseException) -> bool:
        """Return whether one state of the disk explains both errors: it is full, read-only or broken."""
        same = isinstance(other, StorageError) and self.number == other.number
        return same and self.number in (*_FULL, *_REFUSING)


@contextmanager
def whole_folder(folder: Path, *, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield an empty folder to write to. At the end rename it to `folder`, replacing an existing one.

    `needed_bytes`: space that must be free. Raise StorageError if it is not, or if writing fails. After any exception
    `folder` is unchanged and the new folder is removed.
    """
    folder = folder.resolve()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _refuse_file(folder)
        check_room(folder, needed_bytes)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        replace_folder(folder, partial)
    except UserError:
        raise
    except Exception as error:
        if (cause := _os_error(error)) is None:
            raise
        raise _storage_error(folder, cause) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a `StorageError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise _storage_error(path, error) from error


def check_place(folder: Path) -> None:
    """Raise StorageError if `whole_folder` will not be able to put `folder` in its place. Nothing is written.

    Call it before the work whose result goes there."""
    folder = folder.resolve()
    with writing(folder):
        _refuse_file(folder)
        above = next(path for path in folder.parents if path.exists())
        _refuse_file(above)
        if not os.access(above, os.W_OK | os.X_OK):
            reason = f"the folder {above}, or the disk that it is on, cannot be written to"
            raise PermissionError(errno.EACCES, reason, str(above))


def check_room(
    folder: Path,
    needed_bytes: int,
    *,
    largest_file: int = 0,
    least_files: int = 0,
    holds: str = "",
    fix: str = "",
) -> None:
    """Raise StorageError if `folder` cannot get `needed_bytes`: the disk has fewer free bytes, or takes fewer files, or
    this process may not write its largest file (`ulimit -f`). `folder` need not exist.

    `largest_file`: bytes, at most `needed_bytes`. `least_files`: number of files. `holds`: what the bytes are. `fix`:
    what else the user can do.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise _no_room(
            folder,
            f"it takes {needed_bytes:,} bytes{holds}, but only {free:,} are free on the disk of {existing}",
            f"free some space, or write to a different disk{fix}",
        )
    if least_files and (files := _files_left(existing)) is not None and files < least_files:
        raise _no_room(
            folder,
            f"the disk of {existing} takes only {files} more files (inodes), whatever their size",
            f"remove files there, or write to a different disk{fix}",
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest_file:
        raise _no_room(
            folder,
            f"its largest file takes {largest_file:,} bytes, but this process may only write files of {limit:,}",
            f"raise the limit: ulimit -f unlimited{fix}",
        )


def _files_left(folder: Path) -> int | None:
    """Return how many more files the disk of `folder` takes, or None if it has no limit."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_favail if disk.f_files else None


def _no_room(folder: Path, why: str, fix: str) -> StorageError:
    what = f"there is no room for {folder}"
    return StorageError(what, why=why, fix=fix, number=errno.ENOSPC)


def replace_folder(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`.

    An existing folder is moved aside first. It is removed at the end, or moved back after an error.
    """
    folder = folder.resolve()
    _refuse_file(folder)
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


def _refuse_file(folder: Path) -> None:
    """Raise an OSError if `folder` is a file, which would be moved aside and stay there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(folder))


def free_name(path: Path) -> Path:
    """Return `path` if nothing has this name, else the first of PATH.1, PATH.2, ... that is free."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in itertools.chain([path], numbered) if not os.path.lexists(name))


def remove_folder(folder: Path) -> None:
    """Rename `folder`, then remove it. Raise StorageError if that fails.

    If the process is killed in between, `recover` removes the rest.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        folder.rename(partial)
        _remove(partial)
    except OSError as error:
        raise StorageError(f"{folder} could not be removed", why=error.strerror) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def recover(parent: Path, name: str | None = None, *, alone: bool = False) -> list[str]:
    """Clean up after killed processes in `parent`. Return a line of text for each change.

    Half-written folders are removed. A folder that was moved aside and not replaced is moved back.

    `name`: clean up only after writes to the folder with this name. `alone`: a lock guarantees that no other process
    works in `parent`. If it is False, the folders of running processes are not changed.
    """
    done = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or name not in (None, match["name"]):
            continue
        pid = int(match["pid"])
        if not alone and pid != os.getpid() and psutil.pid_exists(pid):
            continue
        if match["kind"] == "old" and not (parent / match["name"]).exists():
            with writing(path):
                path.rename(parent / match["name"])
            done.append(
                f"restored {parent / match['name']}, whose replacement a killed process did not finish"
            )
            continue
        try:
            _remove(path)
            done.append(f"removed {path}, which a killed process left incomplete")
        except OSError as error:
            done.append(
                f"{path}, which a killed process left incomplete, cannot be removed: {error.strerror}"
            )
    return done


def set_aside(folder: Path, suffix: str) -> Path:
    """Rename `folder` to `FOLDER.SUFFIX`, replacing an earlier folder of that name. Return the new path."""
    target = folder.with_name(f"{folder.name}.{suffix}")
    with writing(target):
        replace_folder(target, folder)
    return target


def write_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: write a temporary file beside it, then rename that. Make missing parent folders.

    If the disk refuses to write, raise StorageError and leave an existing file unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_error(error: Exception) -> OSError | None:
    """Return the error of the operating system in an exception of a library, or None if it has another cause.

    torch raises a RuntimeError in its place. safetensors and tokenizers, written in Rust, have its number in a text."""
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    number = _OS_ERROR.search(str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def _storage_error(folder: Path, error: OSError) -> StorageError:
    fix = "write to another folder or disk"
    why = error.strerror or str(error)
    if error.errno in _FULL:
        fix = "free some space, or raise the quota or the file size limit"
        above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if error.errno == errno.ENOSPC and _files_left(above) == 0:
            why += ": it takes no more files (inodes), whatever their size"
            fix = "remove files there, or write to another disk"
    elif error.errno in _IN_THE_WAY:
        fix = f"move away or rename what has the name {error.filename2 or error.filename or folder} now"
    what = f"{folder} could not be written"
    return StorageError(what, why=why, fix=fix, number=error.errno)


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. Raise StorageError if the disk refuses to write it."""
    write_text(Path(path), json.dumps(json_safe(content), indent=2, allow_nan=False) + "\n")


def append_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each entry. Raise StorageError if the disk refuses to write them.

    If a crash or a full disk has cut off the last line, the next one begins on a new line."""
    text = "".join(json.dumps(json_safe(entry), allow_nan=False) + "\n" for entry in entries)
    with writing(path), path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())


def read_lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines, or [] if it is missing. Lines that a crash has cut off are skipped."""
    values = [value_of(line) for line in lines_of(path)]
    return [value for value in values if value is not DAMAGED]


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends, or [] if it is missing."""
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def value_of(line: bytes) -> Any:
    """Return the value of a line of JSON, or `DAMAGED` if it is torn or no JSON in UTF-8, such as the zeros that a
    power cut can leave. An editor may have put a byte order mark before the first one."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return DAMAGED


def json_safe(value: Any) -> Any:
    """Convert `value` to JSON types: paths and non-finite floats to text, torch's and NumPy's scalars to numbers."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = number(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> float:
    return value.item() if hasattr(value, "item") else value


def fresh_run_dir(run_dir: Path) -> None:
    """Move an earlier run aside, to `NAME.1`, `NAME.2`, ..., so that two runs never share a metrics file.

    A folder without metrics, checkpoints and summary, as after a dry run or a refused run, is not moved.
    """
    from qarl.lora.adapter import name_base  # imports PyTorch, which a report does not need

    if not holds_a_run(run_dir):
        return
    target = free_name(run_dir)
    with writing(target):
        run_dir.rename(target)
        name_base(target / EXPORT)
    note(f"{run_dir} contained an earlier run, which is now in {target}")


def holds_a_run(run_dir: Path) -> bool:
    """Return whether the folder has metrics, checkpoints or the summary of a run."""
    names = (METRICS_FILE, SUMMARY_FILE, checkpoints_dir(run_dir).name)
    return any((run_dir / name).exists() for name in names)


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"
