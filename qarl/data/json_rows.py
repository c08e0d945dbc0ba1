"""Read the rows of a JSON file: one object a line, or one list of objects.

Python's own reader is used, because it infers nothing. The readers of pyarrow and pandas, on which the package
`datasets` and so verl depend, turn text that looks like a date into a date, and "true" in a field with truth values
into a truth value. orjson turns whole numbers beyond 64 bits into floats.

An object with a key that stands twice is refused, because one of the two values would be lost. `NaN` and `Infinity`,
which Python writes but JSON does not have, are read as numbers, as in Parquet.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qarl.errors import UserError

_SHOWN = 60
_LINES = 'write one JSON object per line, {"data_source": ..., "prompt": [...], ...}, for example with json.dumps'
_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_FORMATS = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\x28\xb5\x2f\xfd": "zstd",
}
"""First bytes of files that often have the wrong ending."""


def read_json(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file. Raise UserError, with the line, if it is not UTF-8 or not JSON; OSError as usual."""
    with path.open("rb") as stream:
        refuse_other_format(path, stream.read(4))
        stream.seek(0)
        first = _first_character(stream)
        stream.seek(0)
        if first == b"[":
            return _list_of_rows(path, stream.read())
        return list(_rows_of_lines(path, stream))


def refuse_other_format(path: Path, start: bytes) -> None:
    """Raise UserError if `start`, the first four bytes of a text file, are those of another format."""
    for mark, name in _FORMATS.items():
        if start.startswith(mark):
            fix = "give the file its right ending" if name == "Parquet" else "unpack it first"
            raise cannot_read(path, f"its content is {name}, not text", fix)
    for mark, name in _ENCODINGS.items():
        if start.startswith(mark):
            fix = f"save it as UTF-8, for example: iconv -f {name} -t UTF-8 OLD > NEW"
            raise cannot_read(path, f"it is encoded as {name}", fix)


def cannot_read(path: Path, why: str, fix: str, *, line: int | None = None) -> UserError:
    where = f"{path}, line {line}" if line else str(path)
    return UserError(f"cannot read the data file {path}", where=where, why=why, fix=fix)


def _first_character(stream: Any) -> bytes:
    """Return the first byte that is not a space or part of a byte order mark."""
    for number, line in enumerate(stream):
        text = _without_mark(line) if number == 0 else line
        if text.strip():
            return bytes(text.strip()[:1])
    return b""


def _without_mark(data: bytes) -> bytes:
    return data.removeprefix(codecs.BOM_UTF8)


def _rows_of_lines(path: Path, stream: Any) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(stream, start=1):
        data = _without_mark(line) if number == 1 else line
        if data.strip():
            yield _checked_row(path, _parsed(path, data, number), number)


def _list_of_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    rows = _parsed(path, _without_mark(data), 1)
    return [_checked_row(path, row, None) for row in rows]


def _parsed(path: Path, data: bytes, line: int) -> Any:
    """Return the value that `data` contains. `line`: number of its first line in the file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        why = f"byte {data[error.start]:#04x} is not UTF-8; the file may be in Latin-1 or another old encoding"
        fix = "save it as UTF-8, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        raise cannot_read(path, why, fix, line=line) from error
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        truncated = not text.endswith("\n") and error.pos >= len(text.rstrip()) - 1
        why = f"{error.msg} at character {error.colno}: {_around(text, error.pos)}"
        if "\0" in text:
            why = "it contains NUL bytes, as a file has whose writing was interrupted"
        fix = "the file seems to be truncated; write or copy it again" if truncated else _LINES
        raise cannot_read(path, why, fix, line=line + error.lineno - 1) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a key that stands twice, too many digits, too deeply nested
        raise cannot_read(path, str(error), "correct the row", line=line) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"the key {twice!r} stands twice in an object, so one of its values would be lost"
        )
    return values


def _around(text: str, position: int) -> str:
    start = max(0, position - _SHOWN // 2)
    return repr(text[start : start + _SHOWN].strip())


def _checked_row(path: Path, row: Any, line: int | None) -> dict[str, Any]:
    if not isinstance(row, dict):
        why = f"a row must be a JSON object, {{...}}, not {str(row)[:_SHOWN]!r}"
        raise cannot_read(path, why, _LINES, line=line)
    if "\\ud" in json.dumps(row).lower():  # the only characters that Unicode text cannot contain
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            why = "it has half of a surrogate pair (\\ud800 to \\udfff), which is not a character and has no token"
            raise cannot_read(path, why, "remove it from the text", line=line) from error
    return row
