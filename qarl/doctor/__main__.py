"""`python -m qarl.doctor config=NAME.yaml key=value ...`: what would go wrong with a run, before it starts.

Takes the arguments of `qarl.train`, starts no engine and loads no weights, and prints findings by topic (see
`qarl.doctor`). `doctor.device=h100 doctor.gpu_memory_gib=80` judges for such GPUs instead of this machine;
`doctor.json=PATH` also writes the findings as JSON. Exit codes: 0 nothing was found that stops the run; 1 the run would
fail; 2 the config cannot be read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qarl.config import load_config
from qarl.console import run_command
from qarl.doctor.target import find_target, split_arguments
from qarl.errors import UserError
from qarl.process import limit_threads

if TYPE_CHECKING:
    from qarl.doctor.findings import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the run that `argv` describes; returns the exit code."""
    return run_command(_main, argv)


def _main(argv: list[str]) -> int:
    arguments = split_arguments(argv)
    config = load_config(arguments.run)
    threads_given = os.environ.get("OMP_NUM_THREADS")
    limit_threads(config.trainer.num_threads)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from qarl.doctor.run import run_checks

    report = run_checks(config, find_target(arguments.options, config.backend), threads_given=threads_given)
    print(report)
    if path := arguments.options.get("json"):
        write_report(path, report)
    return report.exit_code


def write_report(path: str, report: Report) -> None:
    """The findings as JSON; UserError where they cannot be written."""
    from qarl.checkpoint.json_file import write_json

    why = None
    if os.path.lexists(path.replace("\0", "")) and not os.path.isfile(path):
        why = "it is there, and is not a file"  # a device would be replaced, not written to
    else:
        try:
            write_json(path, report.to_json())
        except (UserError, ValueError) as error:  # ValueError: NUL in the path
            why = getattr(error, "why", None) or str(error)
    if why:
        path = path.replace("\0", "\\0")
        fix = "give a file in a folder that can be written to"
        raise UserError(f"doctor.json={path} cannot be written", why=why, fix=fix)


if __name__ == "__main__":
    sys.exit(main())
