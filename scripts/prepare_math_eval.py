"""Evaluation sets for verl's validation: AIME24, AIME25, AMC, MATH-500, Minerva, OlympiadBench, one parquet file each.

    python scripts/prepare_math_eval.py                                    # from the Hugging Face Hub
    python scripts/prepare_math_eval.py --sets math500 --file math500=downloads/test.jsonl     # offline

Small sets are sampled several times a problem (avg@32): of 30 problems one is 3 points. verl's trainer takes that
number row by row from the column `__rollout_n__`, so one validation has avg@32 on AIME and one response a problem on
MATH-500; its `val_kwargs.n` is one number for all files. verl's deprecated v0 trainer ignores the column.

A set is left as its makers published it, duplicates included (they are counted): only rows without a usable reference
answer are dropped, and the report beside each file says how many. Their problems must not be trained on either:
NAME.keys has the keys of all published ones, for prepare_openr1_math.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from math_data import (
    SAMPLES_COLUMN,
    SCHEMA,
    Counts,
    Source,
    add_source_arguments,
    exit_code,
    local_files,
    problems,
    to_row,
    write_parquet,
    write_report,
)
from math_text import problem_key

from qarl.errors import UserError

# Source and responses per problem, as LUFFY (arXiv 2504.14945) evaluates. AMC: the 83 problems of AMC12 2022 and 2023.
SETS = {
    "aime24": (Source("HuggingFaceH4/aime_2024", split="train"), 32),
    "aime25": (Source("math-ai/aime25", split="test"), 32),
    "amc": (Source("AI-MO/aimo-validation-amc", split="train"), 32),
    "math500": (Source("HuggingFaceH4/MATH-500", split="test"), 1),
    "minerva": (Source("math-ai/minervamath", split="test"), 1),
    "olympiadbench": (Source("math-ai/olympiadbench", split="test"), 1),
}
EVAL_SCHEMA = SCHEMA.append(pa.field(SAMPLES_COLUMN, pa.int64()))


def keys_file(path: Path) -> Path:
    """Beside a set's parquet: `problem_key` of each problem as published, dropped ones too, in hex, one a line."""
    return path.with_suffix(".keys")


def prepare(
    name: str, source: Source, samples: int, output: Path, seen: dict[bytes, str], workers: int
) -> Counts:
    """Write output/NAME.parquet and its report. `seen` maps the problems of earlier sets to their set, and grows."""
    counts = Counts()
    path = output / f"{name}.parquet"
    repeated: dict[str, int] = {}
    published: dict[bytes, None] = {}
    keys_file(path).unlink(missing_ok=True)

    def note(problem: str) -> None:
        published[problem_key(problem)] = None

    def rows() -> Iterator[dict[str, Any]]:
        for index, item in enumerate(problems(source, counts, workers=workers, published=note)):
            key = problem_key(item.problem)
            if key in seen:
                repeated[seen[key]] = repeated.get(seen[key], 0) + 1
            seen.setdefault(key, name)
            yield to_row(item, name, "test", index) | {SAMPLES_COLUMN: samples}

    counts.written = write_parquet(path, EVAL_SCHEMA, rows())
    keys_file(path).write_text("".join(f"{key.hex()}\n" for key in published), encoding="utf-8")
    write_report(
        path,
        source,
        counts,
        samples_per_problem=samples,
        problems_also_in=dict(sorted(repeated.items())),
    )
    print(
        f"{path}: {counts.describe()}"
        + "".join(f"; {n} also in {other}" for other, n in sorted(repeated.items()))
    )
    return counts


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data/math_eval"), help="folder of the files"
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="which sets; all by default"
    )
    many: Any = {"action": "append", "default": []}
    parser.add_argument(
        "--file", **many, metavar="SET=PATH", help="local file or folder, not the Hub; repeatable"
    )
    parser.add_argument(
        "--samples", **many, metavar="SET=N", help="responses per problem in validation; repeatable"
    )
    add_source_arguments(parser)
    return parser.parse_args(argv)


def by_set(option: str, values: Sequence[str], chosen: Sequence[str]) -> dict[str, str]:
    """`SET=VALUE` arguments as a dict. Raises `UserError` for another form, or for a set that is not prepared."""
    by_name = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not rest or name not in chosen:
            why = f"the sets to prepare are {', '.join(chosen)}"
            raise UserError(f"{option} {value}", why=why, fix=f"{option} SET=... with one of them")
        by_name[name] = rest
    return by_name


def sources(args: argparse.Namespace) -> dict[str, tuple[Source, int]]:
    """Source and samples per problem of every chosen set. Raises `UserError` before anything is read."""
    files = by_set("--file", args.file, args.sets)
    samples = by_set("--samples", args.samples, args.sets)
    by_name = {}
    for name in dict.fromkeys(args.sets):
        source, number = SETS[name]
        source = replace(
            source, problem_column=args.problem_column, answer_column=args.answer_column
        )
        if name in files:
            source = replace(source, files=local_files([files[name]]))
        count = samples.get(name, str(number))
        if not count.isdecimal() or int(count) < 1:
            raise UserError(
                f"--samples {name}={count}", why="not a number of responses", fix="1 or more"
            )
        by_name[name] = (source, int(count))
    return by_name


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the chosen sets. Return the exit code."""
    args = parse_arguments(argv)

    def run() -> None:
        seen: dict[bytes, str] = {}
        for name, (source, samples) in sources(args).items():
            prepare(name, source, samples, args.output, seen, args.workers)

    return exit_code(run)


if __name__ == "__main__":
    raise SystemExit(main())
