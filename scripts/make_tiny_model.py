"""Makes the tiny models and their data, as `qarl demo` does, with settings of one's own (`qarl.demo.tiny_model`).

python scripts/make_tiny_model.py               # about a minute on one CPU core; a second call returns at once
python scripts/make_tiny_model.py --experts 8   # a Qwen3-MoE, two of eight experts a token, models/tiny-qwen3-moe
python scripts/make_tiny_model.py --task letter_sorting    # another task (qarl/demo/tasks.py): a few minutes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qarl.demo.tiny_model import QUICKSTART, TASKS, Recipe, make_missing
from qarl.errors import UserError


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is missing. What was made with other settings is replaced only with --overwrite."""
    parser = argparse.ArgumentParser(description="Make the tiny model and its data.")
    parser.add_argument(
        "--task",
        choices=list(TASKS),
        default=QUICKSTART.name,
        help="the task that the model learns",
    )
    parser.add_argument(
        "--output", type=Path, help="the model's folder (models/tiny-qwen3, then -moe and the task)"
    )
    parser.add_argument(
        "--data", type=Path, help="the folder of the parquet files; data/TASK by default"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture; 0 for a dense model")
    parser.add_argument("--steps", type=int, help="most warm-start steps; a few for a test")
    parser.add_argument("--target", type=float, help="greedy accuracy at which to stop")
    parser.add_argument("--train-size", type=int, help="rows of train.parquet")
    parser.add_argument("--test-size", type=int, help="rows of test.parquet")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what was made with other settings"
    )
    args = vars(parser.parse_args(argv))
    overwrite = args.pop("overwrite")
    recipe = Recipe.of(TASKS[args.pop("task")], args.pop("experts"))
    try:
        given = {name: value for name, value in args.items() if value is not None}
        make_missing(replace(recipe, **given), overwrite=overwrite, asks="--overwrite")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
