"""Tells a pointer of git-lfs from the file that it stands for.

`git clone` without git-lfs leaves such a pointer, a text of three lines, under the name of every large file. Format:
https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qarl.errors import UserError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LARGEST = 1024
"""Bytes that a pointer is shorter than, by its specification."""


def is_pointer(path: Path) -> bool:
    """Return whether a file is a pointer. A file that cannot be read is none."""
    try:
        if path.stat().st_size >= _LARGEST:
            return False
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def refuse_pointers(files: Iterable[Path], *, where: str) -> None:
    """Raise UserError if one of `files` is a pointer. `where`: the key that names the files or their folder."""
    pointers = [file for file in files if is_pointer(file)]
    if not pointers:
        return
    folder = pointers[0].parent
    names = ", ".join(file.name for file in pointers[:4])
    more = f" and {len(pointers) - 4} more" if len(pointers) > 4 else ""
    raise UserError(
        f"{folder} has pointers of git-lfs in place of the content of {names}{more}",
        where=where,
        why="the folder was cloned without git-lfs, which would have fetched the content",
        fix=f"run: git -C {folder} lfs install && git -C {folder} lfs pull; or download the files again, for example "
        "with `hf download`",
    )
