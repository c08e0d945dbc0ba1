"""GSM8K as configs/qwen2_5_0_5b_gsm8k_w4a16.yaml reads it: data/gsm8k/train.parquet and data/gsm8k/test.parquet.

    python scripts/prepare_gsm8k.py                                     # from the Hugging Face Hub
    python scripts/prepare_gsm8k.py --train TRAIN.jsonl --test TEST.jsonl    # offline

The reference is the number behind `####` at the end of each solution.
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
    exit_code,
    local_files,
    problems,
    to_row,
    write_parquet,
    write_report,
)


def prepare(source: Source, path: Path, workers: int) -> None:
    """Write `path` and its report."""
    counts = Counts()

    def rows() -> Iterator[dict[str, Any]]:
        for index, item in enumerate(problems(source, counts, workers=workers)):
            yield to_row(item, "gsm8k", source.split, index)

    counts.written = write_parquet(path, SCHEMA, rows())
    write_report(path, source, counts)
    print(f"{path}: {counts.describe()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare both splits. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data/gsm8k"), help="folder of the files"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that verify answers")
    for split in ("train", "test"):
        parser.add_argument(
            f"--{split}", nargs="+", default=[], help="local files or folders, not the Hub"
        )
    args = parser.parse_args(argv)

    def run() -> None:
        for split in ("train", "test"):
            files = local_files(getattr(args, split))
            prepare(
                Source("openai/gsm8k", files, "main", split),
                args.output / f"{split}.parquet",
                args.workers,
            )

    return exit_code(run)


if __name__ == "__main__":
    raise SystemExit(main())
