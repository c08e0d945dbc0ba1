"""Shared by both preparation scripts: rows in, verified rows out, in verl's parquet schema.

Rows are streamed, from a data set on the Hugging Face Hub or, since many clusters are offline, from local .parquet or
.jsonl files. Order is the source's, so the same source gives the same file.

A row is kept only if `reward.function: math_verify` scores its own reference answer, in a box, as 1: any other row
would punish right answers. What is left out is counted by reason in `NAME.report.json` beside the output. verl's own
preparation scripts (examples/data_preprocess) take the reference as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from math_text import INSTRUCTION, RowError, answer_text, problem_text, verifies_itself

from qarl.errors import UserError

BATCH = 1024
SHOWN = 5

PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "reward_model", "solution")

# All files have one schema, extra_info's fields included: verl concatenates its validation files.
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("source_row", pa.int64())]),
        ),
    ]
)
# verl's trainer samples this many responses to the row in validation, instead of rollout.val_kwargs.n.
SAMPLES_COLUMN = "__rollout_n__"


@dataclass(frozen=True)
class Source:
    """Local files in the order given, or a data set of the Hub with its `subset` and `split`.

    `name` may end in @REVISION. `problem_column` and `answer_column` null: the first of the usual names that is there.
    """

    name: str
    files: tuple[Path, ...] = ()
    subset: str | None = None
    split: str = "train"
    problem_column: str | None = None
    answer_column: str | None = None


@dataclass
class Counts:
    """Rows of one output file: read, written, and left out by reason, with the first few source rows of each."""

    read: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_rows: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, reason: str, row: int) -> None:
        self.dropped[reason] += 1
        shown = self.first_rows.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(row)

    def describe(self) -> str:
        """One line for the terminal."""
        parts = [f"{count} dropped: {reason}" for reason, count in sorted(self.dropped.items())]
        return f"{self.written} of {self.read} rows" + "".join(f"; {part}" for part in parts)


@dataclass(frozen=True)
class Problem:
    """A usable row: `problem` as a user message without instruction, `answer` normalised."""

    row: int
    problem: str
    answer: str


def problems(
    source: Source, counts: Counts, *, workers: int, published: Callable[[str], None] | None = None
) -> Iterator[Problem]:
    """The verified problems of `source`, in its order; what is left out goes into `counts`.

    `workers` processes verify (1: none, in this one). `published` is given every problem text, whatever its answer.
    Raises `UserError` if the source cannot be read.
    """
    with _verifier(workers) as verify:
        rows = enumerate(_rows(source))
        while chunk := list(islice(rows, BATCH)):
            counts.read += len(chunk)
            usable = []
            for number, (problem, answer) in chunk:
                try:
                    text = problem_text(problem)
                    if published is not None:
                        published(text)
                    usable.append(Problem(number, text, answer_text(answer)))
                except RowError as error:
                    counts.drop(str(error), number)
            for item, verifies in zip(
                usable, verify([item.answer for item in usable]), strict=True
            ):
                if verifies:
                    yield item
                else:
                    counts.drop("reference answer does not verify", item.row)
    if not counts.read:
        raise UserError(
            "the source has no rows", where=source.name, fix="name another file, or another split"
        )


@contextmanager
def _verifier(workers: int) -> Iterator[Callable[[Sequence[str]], list[bool]]]:
    """Yield a function from answers to whether each verifies itself, in order."""
    if workers <= 1:
        yield lambda answers: [verifies_itself(answer) for answer in answers]
    else:  # "spawn": a fork would copy the reader's threads' locks.
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield lambda answers: list(pool.map(verifies_itself, answers, chunksize=32))


def _rows(source: Source) -> Iterator[tuple[Any, Any]]:
    """(problem, answer) of every row, as the source has them."""
    if not source.files:
        yield from _hub_rows(source)
    for file in source.files:
        try:
            yield from (_parquet_rows if file.suffix == ".parquet" else _json_rows)(file, source)
        except (OSError, ValueError, pa.ArrowException) as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            fix = "name a .parquet file or a UTF-8 .jsonl file; it may be cut short, or a pointer of Git LFS"
            raise UserError("cannot read the file", where=str(file), why=why, fix=fix) from error


def _columns(names: Iterable[str], source: Source, where: str) -> tuple[str, str]:
    """The problem's and the answer's column among `names`."""
    names = list(names)
    columns = []
    for what, chosen, usual in (
        ("problem", source.problem_column, PROBLEM_COLUMNS),
        ("answer", source.answer_column, ANSWER_COLUMNS),
    ):
        accepted = (chosen,) if chosen else usual
        if not (there := [name for name in accepted if name in names]):
            why = f"looked for {', '.join(accepted)}; there are {', '.join(names) or 'none'}"
            raise UserError(
                f"no column with the {what}",
                where=where,
                why=why,
                fix=f"name it with --{what}-column",
            )
        columns.append(there[0])
    return columns[0], columns[1]


def _parquet_rows(file: Path, source: Source) -> Iterator[tuple[Any, Any]]:
    with pq.ParquetFile(file) as parquet:
        columns = _columns(parquet.schema_arrow.names, source, str(file))
        for batch in parquet.iter_batches(256, columns=list(dict.fromkeys(columns))):
            yield from ((row[columns[0]], row[columns[1]]) for row in batch.to_pylist())


def _json_rows(file: Path, source: Source) -> Iterator[tuple[Any, Any]]:
    columns = None
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row: dict[str, Any] = dict(json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {number} is not a JSON object: {line[:60]!r}") from error
            columns = columns or _columns(row, source, f"{file}:{number}")
            yield row.get(columns[0]), row.get(columns[1])


def _hub_rows(source: Source) -> Iterator[tuple[Any, Any]]:
    import datasets

    name, _, revision = source.name.partition("@")
    try:
        stream = datasets.load_dataset(
            name, source.subset, split=source.split, revision=revision or None, streaming=True
        )
        names = stream.column_names or list(next(iter(stream), {}))
    except (
        Exception
    ) as error:  # what `datasets` raises depends on the network and on the repository
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        fix = "check the name and the network; offline, download its files elsewhere and name them instead"
        raise UserError(f"cannot load the data set {source.name}", why=why, fix=fix) from error
    columns = _columns(names, source, source.name)
    yield from (
        (row.get(columns[0]), row.get(columns[1]))
        for row in stream.select_columns(list(set(columns)))
    )


def local_files(names: Sequence[str]) -> tuple[Path, ...]:
    """`names` as files, folders as the .parquet and .jsonl files in them, sorted.

    Raises `UserError` for one that is not there, has no such files, or is of another format.
    """
    files: list[Path] = []
    for path in map(Path, names):
        paths = (
            sorted(path.glob("*.parquet")) + sorted(path.glob("*.jsonl"))
            if path.is_dir()
            else [path]
        )
        if not paths or not all(
            file.is_file() and file.suffix in (".parquet", ".jsonl", ".json") for file in paths
        ):
            raise UserError(
                "there is no .parquet or .jsonl file", where=str(path), fix="correct the path"
            )
        files += sorted(paths)
    return tuple(files)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both scripts take."""
    parser.add_argument(
        "--problem-column", help="column of the problems, if it has an unusual name"
    )
    parser.add_argument("--answer-column", help="column of the answers, likewise")
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes verifying answers",
    )


def exit_code(prepare: Callable[[], object]) -> int:
    """Return the exit code of a script that prepares data: 2 after a `UserError`, which is printed."""
    try:
        prepare()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def to_row(item: Problem, data_source: str, split: str, index: int) -> dict[str, Any]:
    """One row of `SCHEMA`; `index` counts the rows of the output."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{item.problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": item.answer},
        "extra_info": {"split": split, "index": index, "source_row": item.row},
    }


def write_parquet(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> int:
    """Write `rows` to `path`, which appears only when it is complete; returns how many. Raises `UserError`."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    iterator = iter(rows)
    written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(staging, schema) as writer:
            while chunk := list(islice(iterator, BATCH)):
                writer.write_table(pa.Table.from_pylist(chunk, schema))
                written += len(chunk)
        if not written:
            fix = "check that the columns with problems and answers are the right ones"
            raise UserError(
                "no row is left to write", where=str(path), why="all were dropped", fix=fix
            )
        os.replace(staging, path)
    except OSError as error:
        raise UserError(
            "cannot write", where=str(path), why=str(error), fix="name another --output"
        ) from error
    finally:
        staging.unlink(missing_ok=True)
    return written


def write_report(path: Path, source: Source, counts: Counts, **more: Any) -> None:
    """`NAME.report.json` beside `path`: where the rows came from, how many were left out and why."""
    report = {
        "source": [str(file) for file in source.files] or source.name,
        "subset": source.subset,
        "split": source.split if not source.files else None,
        "rows_read": counts.read,
        "rows_written": counts.written,
        "dropped": dict(sorted(counts.dropped.items())),
        "first_dropped_source_rows": dict(sorted(counts.first_rows.items())),
        **more,
    }
    path.with_suffix(".report.json").write_text(
        json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )
