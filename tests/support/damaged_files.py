"""Data files that are damaged or odd: how to write each, and what the error must say, or None if it is simply read.

A file that is read has `ROWS` in it.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from bad_runs import row

ROWS = [row("t3 t4 é", "7"), row("t5 t6", "2024-01-01")]
ACCENTED_LIST = json.dumps(ROWS, indent=1, ensure_ascii=False)
LINES = [json.dumps(entry, ensure_ascii=False) for entry in ROWS]
TEXT = "\n".join(LINES) + "\n"
NESTED = 100_000
POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 988097824
"""
"""What `git clone` without git-lfs leaves in place of a large file."""

Write = Callable[[Path], object]


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> bytes:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


def cut(path: Path, start: int, end: int) -> None:
    path.write_bytes(parquet(path)[start:end])


def broken_page(path: Path) -> None:
    whole = bytearray(parquet(path, [row("t3 " * 5000 + str(i)) for i in range(500)]))
    whole[200:1200] = os.urandom(1000)
    path.write_bytes(whole)


def not_utf8_in_parquet(path: Path) -> None:
    """Text whose bytes are no UTF-8, as some writers leave it."""
    texts = pyarrow.array([b"caf\xe9"]).view(pyarrow.string())
    plain = pyarrow.Table.from_pylist(ROWS[:1])
    pyarrow.parquet.write_table(plain.set_column(0, "data_source", texts), path)


def write(data: str | bytes, encoding: str = "utf-8") -> Write:
    return lambda path: path.write_bytes(data if isinstance(data, bytes) else data.encode(encoding))


def lines(*items: Any) -> Write:
    return write("".join(json.dumps(item) + "\n" for item in items))


def loop(path: Path) -> None:
    path.symlink_to(path)


DAMAGED: dict[str, tuple[str, Write, list[str] | None]] = {
    "plain": ("x.jsonl", write(TEXT), None),
    "plain Parquet": ("x.parquet", parquet, None),
    "byte order mark": ("x.jsonl", write(TEXT, "utf-8-sig"), None),
    "Windows line ends": ("x.jsonl", write(TEXT.replace("\n", "\r\n")), None),
    "no line end at the end": ("x.jsonl", write(TEXT[:-1]), None),
    "blank lines": ("x.jsonl", write("\n \n" + "\n\n".join(LINES) + "\n\n"), None),
    "a list of rows": ("x.json", write(json.dumps(ROWS)), None),
    "a list of rows over many lines": (
        "x.jsonl",
        write(json.dumps(ROWS, indent=1), "utf-8-sig"),
        None,
    ),
    "Latin-1": ("x.jsonl", write(TEXT, "latin-1"), ["line 1", "0xe9", "iconv"]),
    "Latin-1 in a list": (
        "x.json",
        write(ACCENTED_LIST, "latin-1"),
        ["line ", "0xe9"],
    ),
    "UTF-16": ("x.jsonl", write(TEXT, "utf-16"), ["UTF-16", "iconv"]),
    "UTF-16, the other order": (
        "x.jsonl",
        write(codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be")),
        ["UTF-16", "iconv"],
    ),
    "UTF-16 without a mark": ("x.jsonl", write(TEXT, "utf-16-le"), ["line 1", "UTF-8|NUL"]),
    "empty": ("x.jsonl", write(""), ["no rows"]),
    "only blank lines": ("x.jsonl", write("\n\n"), ["no rows"]),
    "only a byte order mark": ("x.jsonl", write(codecs.BOM_UTF8), ["no rows"]),
    "an empty list": ("x.json", write("[]"), ["no rows"]),
    "empty Parquet": ("x.parquet", write(b""), ["no rows"]),
    "Parquet without rows": (
        "x.parquet",
        lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), path),
        ["no rows"],
    ),
    "truncated Parquet": ("x.parquet", lambda path: cut(path, 0, 900), ["truncated"]),
    "Parquet without its start": ("x.parquet", lambda path: cut(path, 100, 10**6), ["begins with"]),
    "a damaged page": ("x.parquet", broken_page, ["cannot read"]),
    "Parquet with text that is not UTF-8": (
        "x.parquet",
        not_utf8_in_parquet,
        ["cannot read", "UTF"],
    ),
    "JSON named .parquet": ("x.parquet", write(TEXT), ["begins with", "ending"]),
    "Parquet named .jsonl": ("x.jsonl", parquet, ["Parquet", "ending"]),
    "a pointer of git-lfs": ("x.jsonl", write(POINTER), ["git-lfs", "lfs pull", "x.jsonl"]),
    "a pointer of git-lfs named .parquet": (
        "x.parquet",
        write(POINTER),
        ["git-lfs", "lfs pull", "x.parquet"],
    ),
    "a truncated last line": ("x.jsonl", write(TEXT[:-30]), ["line 2", "truncated"]),
    "a truncated list": ("x.json", write(json.dumps(ROWS)[:-30]), ["truncated"]),
    "CSV named .jsonl": (
        "x.jsonl",
        write("data_source,prompt\ntest,t3\n"),
        ["line 1", "one JSON object per line"],
    ),
    "YAML named .json": (
        "x.json",
        write("- data_source: test\n"),
        ["line 1", "one JSON object per line"],
    ),
    "one object over many lines": (
        "x.json",
        write(json.dumps(ROWS[0], indent=1)),
        ["one JSON object per line"],
    ),
    "a list in a line": (
        "x.jsonl",
        write(LINES[0] + "\n[1]\n"),
        ["line 2", "must be a JSON object"],
    ),
    "a list of texts": ("x.json", write('["t3"]'), ["must be a JSON object"]),
    "a number": ("x.jsonl", write("5\n"), ["line 1", "must be a JSON object"]),
    "two objects in a line": ("x.jsonl", write(" ".join(LINES)), ["line 1", "Extra data"]),
    "single quotes": ("x.jsonl", write(str(ROWS[0])), ["line 1", "one JSON object per line"]),
    "gzip": (
        "x.jsonl",
        lambda path: path.write_bytes(gzip.compress(TEXT.encode())),
        ["gzip", "unpack"],
    ),
    "gzip by its name": (
        "x.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(TEXT.encode())),
        ["unknown kind"],
    ),
    "NUL bytes": ("x.jsonl", write(TEXT + "\0" * 4096), ["line 3", "NUL"]),
    "a key that stands twice": (
        "x.jsonl",
        write(LINES[0] + "\n" + LINES[1].replace('"style"', '"ground_truth"') + "\n"),
        ["line 2", "'ground_truth' stands twice"],
    ),
    "a lone surrogate": ("x.jsonl", lines(ROWS[0], row("t3 \ud83d")), ["line 2", "surrogate"]),
    "a pair of surrogates": ("x.jsonl", write(TEXT.replace("t5", "t5 \\ud83d\\ude00")), None),
    "deeply nested": (
        "x.jsonl",
        write('{"a":' + "[" * NESTED + "]" * NESTED + "}"),
        ["line 1", "cannot read"],
    ),
    "nested": ("x.jsonl", write('{"a":' + "[" * 150 + "]" * 150 + "}"), ["row 0", "100 levels"]),
    "too many digits": ("x.jsonl", write('{"a": ' + "9" * 5000 + "}"), ["line 1", "cannot read"]),
    "a huge line": ("x.jsonl", lines(row("t3 " * 10**5)), ["row 0", "max_prompt_length"]),
    "a folder": ("x.jsonl", lambda path: path.mkdir(), ["it is a folder"]),
    "missing": ("x.jsonl", lambda path: None, ["no such data file"]),
    "two names in one text": (
        "a.jsonl,b.jsonl",
        lambda path: None,
        ["no such data file", "write a list"],
    ),
    "a link to itself": ("x.jsonl", loop, ["no such data file|cannot read"]),
    "a name that is too long": (
        f"{'x' * 300}.jsonl",
        lambda path: None,
        ["no such data file|cannot read"],
    ),
    "a file that cannot be read": (
        "x.jsonl",
        lambda path: path.symlink_to("/proc/self/mem"),
        ["cannot read", "rights"],
    ),
    "other columns": (
        "x.jsonl",
        lines({"question": "t3", "answer": "7"}),
        ["missing columns", "question, answer"],
    ),
    "a column that later rows lack": (
        "x.jsonl",
        lines(ROWS[0], {"data_source": "x"}),
        ["row 1", "prompt"],
    ),
    "a prompt that is text": ("x.jsonl", lines(row() | {"prompt": "t3"}), ["row 0", "prompt"]),
    "a prompt of texts": ("x.jsonl", lines(row() | {"prompt": ["t3"]}), ["row 0", "prompt.0"]),
    "a prompt in a list": (
        "x.jsonl",
        lines(row() | {"prompt": [row()["prompt"]]}),
        ["row 0", "prompt.0"],
    ),
    "no messages": ("x.jsonl", lines(row() | {"prompt": []}), ["row 0", "prompt"]),
    "no content": ("x.jsonl", lines(row() | {"prompt": [{"role": "user"}]}), ["row 0", "content"]),
    "a number as content": (
        "x.jsonl",
        lines(row() | {"prompt": [{"role": "user", "content": 5}]}),
        ["row 0", "content"],
    ),
    "a ground truth beside its object": (
        "x.jsonl",
        lines(row() | {"reward_model": "7"}),
        ["row 0", "reward_model"],
    ),
    "no ground truth in Parquet": (
        "x.parquet",
        lambda path: parquet(path, [row(), row("t4", None)]),
        ["row 1", "missing"],
    ),
}
