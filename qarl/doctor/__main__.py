"""Find what would go wrong with a run before it starts.

usage: qarl doctor config=NAME.yaml [KEY=VALUE ...] [doctor.OPTION=VALUE ...]
       qarl doctor --help [SECTION | SECTION.KEY ...]

The arguments are those of qarl train. The command prints findings by topic. It starts no engine and
loads no weights. `python -m qarl.doctor` is the same command.

options to check the run for GPUs that this machine does not have:
  doctor.device=h100         a100, a100-40gb, l40s, rtx4090, h100, h20, h200, b200;
                             cuda for any other GPU
  doctor.gpu_memory_gib=80   memory of one GPU in GiB; default: that of doctor.device
  doctor.gpu_capability=9.0  CUDA compute capability; default: that of doctor.device
  doctor.json=PATH           also write the findings as JSON

exit codes:
  0    nothing was found that would stop the run
  1    the run would fail
  2    the config is invalid: one message says why
  130  ended by Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qarl.console import run_command
from qarl.errors import UserError

if TYPE_CHECKING:
    from qarl.doctor.report import Report

OPTIONS = ("device", "gpu_memory_gib", "gpu_capability", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Check the run that `argv` describes and return the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    from qarl.config import load_config
    from qarl.process import limit_threads

    arguments, options = split_arguments(argv)
    config = load_config(arguments)
    threads_given = os.environ.get("OMP_NUM_THREADS")
    limit_threads(config.trainer.num_threads)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from qarl.checks.machine import find_machine
    from qarl.doctor.report import run_checks

    report = run_checks(config, find_machine(options, config.backend), threads_given=threads_given)
    print(report)
    if path := options.get("json"):
        write_report(path, report)
    return report.exit_code


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the run's own arguments, and the `doctor.*` options by name.

    Raise UserError if an option does not exist, has no value or is given twice.
    """
    run: list[str] = []
    options: dict[str, str] = {}
    for argument in argv:
        if not argument.startswith("doctor."):
            run.append(argument)
            continue
        name, _, value = argument.removeprefix("doctor.").partition("=")
        if name not in OPTIONS or not value or name in options:
            known = ", ".join(f"doctor.{option}=..." for option in OPTIONS)
            why = "it is given twice" if name in options else "the doctor has no such option, or its value is missing"
            fix = f"give each option at most once: {known}"
            raise UserError(f"cannot use {argument!r}", where="command line", why=why, fix=fix)
        options[name] = value
    return run, options


def describe(topics: list[str]) -> str:
    """Return the help: this page and the config's sections, or only the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", topics)


def write_report(path: str, report: Report) -> None:
    """Write the findings to `path` as JSON. Raise UserError if that fails."""
    from qarl.metrics.tracker import write_json

    try:
        if os.path.lexists(path) and not os.path.isfile(path):  # a device would be replaced, not written to
            raise UserError("", why="it exists and is not a regular file")
        write_json(path, report.to_json())
    except (UserError, ValueError) as error:  # ValueError: NUL in the path
        why = getattr(error, "why", None) or str(error)
        shown, fix = path.replace("\0", "\\0"), "give a file in a folder that can be written to"
        raise UserError(f"doctor.json={shown} cannot be written", why=why, fix=fix) from error


if __name__ == "__main__":
    sys.exit(main())
