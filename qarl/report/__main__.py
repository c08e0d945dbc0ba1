"""Write report.html again from the files of one or more run folders.

usage: python -m qarl.report RUN [RUN ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qarl.console import run_command
from qarl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reports of the run folders `argv`. Return the exit code."""
    return run_command(_main, argv, describe=lambda topics: __doc__ or "")


def _main(argv: list[str]) -> int:
    from qarl.report.page import write_report

    if not argv:
        raise UserError("no run folder was given", fix="python -m qarl.report runs/NAME")
    for run in argv:
        print(write_report(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
