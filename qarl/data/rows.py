"""Read the rows of a data file. All backends read with this module, so a reward function gets the same values in each.

Parquet is read by pyarrow, and its columns are decoded by the package `datasets`, as verl decodes them. JSON is read by
`qarl.data.json_rows`, and its rows get the columns of a table (`qarl.data.columns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.config.demos import DEMO_HINT, from_here
from qarl.data.columns import as_table
from qarl.data.git_lfs import refuse_pointers
from qarl.data.json_rows import cannot_read, read_json
from qarl.errors import UserError

_PARQUET = ".parquet"
_JSON = (".jsonl", ".json")
_MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""


def check_data_file(file: str) -> None:
    """Raise UserError if the data file is missing, of an unknown kind or a pointer of git-lfs. Rows are not read."""
    path = Path(file)
    try:
        exists = path.is_file()
        is_folder = path.is_dir()
    except OSError as error:  # a folder above it may not be entered, or the name is too long
        raise _unreadable(path, error) from error
    if not exists:
        why = "it is a folder" if is_folder else f"looked in {path.absolute().parent}"
        fix = f"correct data.train_files / data.val_files{from_here(file)}; {DEMO_HINT}"
        if "," in file:
            why = "a text is the name of one file, commas included"
            fix = f"for several files write a list, for example data.train_files=[{file}]"
        raise UserError(f"no such data file: {file}", why=why, fix=fix)
    if path.suffix not in (_PARQUET, *_JSON):
        raise UserError(
            f"unknown kind of data file: {file}",
            why=f"the name must end in one of {', '.join((_PARQUET, *_JSON))}",
            fix="convert the file, or rename it if only its name is wrong",
        )
    refuse_pointers([path], where="data.train_files / data.val_files")


def read_rows(file: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a file; all have the same keys. Raise UserError if it cannot be read or has no rows."""
    check_data_file(file)
    path = Path(file)
    try:
        rows = _read_parquet(path) if path.suffix == _PARQUET else _read_json(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not len(rows):
        raise UserError(
            "the data file has no rows", where=file, fix="write at least one prompt to it"
        )
    return rows


def _unreadable(path: Path, error: OSError) -> UserError:
    fix = "check the name and the rights of the file, and of the folders above it"
    return cannot_read(path, f"{type(error).__name__}: {error.strerror or error}", fix)


def _read_json(path: Path) -> Sequence[Mapping[str, Any]]:
    rows = read_json(path)
    try:
        return as_table(rows)
    except ValueError as error:
        raise cannot_read(path, str(error), "store such a value as text") from error


def _read_parquet(path: Path) -> Sequence[Mapping[str, Any]]:
    import datasets
    import pyarrow.parquet

    _check_whole(path)
    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        table.validate(
            full=True
        )  # so that no row raises later, for example for text that is not UTF-8
        return datasets.Dataset(table)
    except Exception as error:  # pyarrow raises its own errors and OSError for damaged pages
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or [""])[0][:200]
        fix = "write the file again, for example with datasets.Dataset.from_list(rows).to_parquet(NAME)"
        raise cannot_read(path, f"{type(cause).__name__}: {reason}", fix) from error


def _check_whole(path: Path) -> None:
    """Raise UserError if the file does not begin and end as a Parquet file does."""
    with path.open("rb") as stream:
        start = stream.read(4)
        stream.seek(max(0, path.stat().st_size - 4))
        end = stream.read(4)
    if not start:
        raise UserError(
            "the data file has no rows", where=str(path), why="it is empty", fix="write it again"
        )
    if start != _MAGIC:
        why = f"a Parquet file begins with {_MAGIC!r}, this one with {start!r}"
        raise cannot_read(path, why, "give the file its right ending, or convert it")
    if end != _MAGIC:
        raise cannot_read(
            path, "its end is missing", "the file seems to be truncated; write or copy it again"
        )
