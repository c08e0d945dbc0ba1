"""Write report.html again from the files of one or more run folders.

usage: qarl report runs/NAME [runs/NAME ...]

`python -m qarl.report` is the same command.

exit codes:
  0    all reports were written
  2    a folder is not that of a run, or cannot be written; one message says why
  130  ended by Ctrl-C
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.console import run_command
from qarl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reports of the run folders `argv`. Return the exit code."""
    return run_command(_main, argv, describe=describe)


def _main(argv: list[str]) -> int:
    if not argv:
        raise UserError("no run folder was given", where="command line", fix="qarl report runs/NAME")
    from qarl.report.page import write_report

    for run in argv:
        print(write_report(run))
    return 0


def describe(topics: list[str]) -> str:
    """Return the help: this module's docstring."""
    return (__doc__ or "").strip()


if __name__ == "__main__":
    sys.exit(main())
