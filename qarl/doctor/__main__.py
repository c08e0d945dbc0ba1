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
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import os
import sys

from qarl.console import entry
from qarl.errors import UserError

_PREFIX = "doctor."
_OPTIONS = ("device", "gpu_memory_gib", "gpu_capability", "json")


def _main(argv: list[str]) -> int:
    from qarl.checks.exact_threads import run_threads
    from qarl.config import load_config
    from qarl.process import limit_threads

    _check_prefix(argv)
    options = [word.removeprefix(_PREFIX) for word in argv if word.startswith(_PREFIX)]
    config = load_config([word for word in argv if not word.startswith(_PREFIX)])
    limit_threads(run_threads(config))
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from qarl.checks.machine import DoctorOptions, find_machine
    from qarl.config.command_arguments import read_request
    from qarl.doctor.examination import run_checks
    from qarl.metrics.tracker import write_json

    example = "qarl doctor config=NAME.yaml doctor.device=h100"
    chosen = read_request(DoctorOptions, options, example=example, prefix=_PREFIX)
    report = run_checks(config, find_machine(chosen, config.backend))
    print(report)
    if chosen.json:
        write_json(chosen.json, report.to_json())
    return report.exit_code


def _check_prefix(argv: list[str]) -> None:
    """Raise UserError if an option of the doctor stands without its prefix."""
    for word in argv:
        if word.partition("=")[0] in _OPTIONS:
            raise UserError(
                f"{word} is an option of the doctor",
                where="command line",
                why="keys without a prefix are those of the run's config",
                fix=f"write {_PREFIX}{word}",
            )


def _help(topics: list[str]) -> str:
    """Return the help: this page and the config's sections, or help on the sections and keys in `topics`."""
    from qarl.config.help import config_help

    return config_help(__doc__ or "", topics)


main, describe = entry(_main, __doc__, _help)


if __name__ == "__main__":
    sys.exit(main())
