"""OpenR1-Math-46K as training prompts in verl's schema, without the problems of the evaluation sets.

    python scripts/prepare_math_eval.py && python scripts/prepare_openr1_math.py
    python scripts/prepare_openr1_math.py --file downloads/train-*.parquet          # offline

The paper (arXiv 2604.07853) trains on OpenR1-Math-46K: the problems of LUFFY (arXiv 2504.14945), published as
Elliott/Openr1-Math-46k-8192. Its system prompt asks for a format of LUFFY's own and is left out; a problem gets the
instruction to box its answer, which every chat template carries. Any set with a problem and an answer column will do.

A problem is left out if one of the evaluation sets published it or it came before, compared as in
`math_text.problem_key`. All sets of prepare_math_eval.py must be there; --eval-sets names others, or fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from math_data import (
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
from prepare_math_eval import SETS, keys_file

from qarl.errors import UserError

DATA_SOURCE = "openr1_math"
HUB = "Elliott/Openr1-Math-46k-8192"


def evaluation_keys(folder: Path, names: Sequence[str]) -> dict[str, list[bytes]]:
    """Keys of all problems that the sets `names` in `folder` published, by set. Raises `UserError`."""
    keys: dict[str, list[bytes]] = {}
    for name in dict.fromkeys(names):
        file = keys_file(folder / f"{name}.parquet")
        try:
            keys[name] = [
                bytes.fromhex(line) for line in file.read_text(encoding="utf-8").splitlines()
            ]
        except FileNotFoundError as error:
            why = "training prompts that occur in an evaluation set must be left out"
            fix = "run scripts/prepare_math_eval.py first, or name its folder and sets with --eval and --eval-sets"
            raise UserError(
                f"the evaluation set {name} is not in {folder}", where=str(file), why=why, fix=fix
            ) from error
    return keys


def prepare(source: Source, sets: dict[str, list[bytes]], path: Path, workers: int) -> Counts:
    """Write `path` and its report; no problem with a key in `sets` is in it."""
    counts = Counts()
    evaluation = {key: name for name in reversed(sets) for key in sets[name]}
    answers: dict[bytes, str] = {}

    def rows() -> Iterator[dict[str, Any]]:
        for item in problems(source, counts, workers=workers):
            key = problem_key(item.problem)
            if key in evaluation:
                counts.drop(f"in evaluation set {evaluation[key]}", item.row)
            elif key in answers:
                same = answers[key] == item.answer
                counts.drop(
                    "duplicate" if same else "duplicate with another answer, the first one kept",
                    item.row,
                )
            else:
                answers[key] = item.answer
                yield to_row(item, DATA_SOURCE, "train", len(answers) - 1)

    counts.written = write_parquet(path, SCHEMA, rows())
    published = {name: len(keys) for name, keys in sets.items()}
    write_report(
        path, source, counts, evaluation_sets=published, evaluation_problems=len(evaluation)
    )
    print(f"{path}: {counts.describe()}")
    return counts


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data/openr1_math/train.parquet"), help="file to write"
    )
    parser.add_argument(
        "--dataset", default=HUB, help="name on the Hugging Face Hub, optionally with @REVISION"
    )
    parser.add_argument("--subset", help="subset (configuration) of the data set")
    parser.add_argument("--split", default="train", help="split of the data set")
    parser.add_argument(
        "--file", nargs="+", default=[], help="local files or folders instead of the Hub"
    )
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument(
        "--eval", type=Path, default=Path("data/math_eval"), help="folder of prepare_math_eval.py"
    )
    parser.add_argument(
        "--eval-sets", nargs="+", default=list(SETS), help="sets in that folder; by default all six"
    )
    held_out.add_argument(
        "--no-eval", action="store_true", help="leave nothing out for an evaluation set"
    )
    add_source_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the training set. Return the exit code."""
    args = parse_arguments(argv)

    def run() -> None:
        files = local_files(args.file)
        source = Source(
            args.dataset, files, args.subset, args.split, args.problem_column, args.answer_column
        )
        prepare(
            source,
            {} if args.no_eval else evaluation_keys(args.eval, args.eval_sets),
            args.output,
            args.workers,
        )

    return exit_code(run)


if __name__ == "__main__":
    raise SystemExit(main())
