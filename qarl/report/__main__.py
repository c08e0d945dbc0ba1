"""Write report.html again from the files of one or more run folders, or one page that compares them.

usage: qarl report runs/NAME [runs/NAME ...] [together=FILE.html]

With together=FILE.html it writes only that page, with the curves of all runs in the same charts. Of what has this name
it replaces only an earlier page of that kind.
`python -m qarl.report` is the same command.

exit codes:
  0    all reports were written
  2    a folder is not that of a run, or cannot be written; one message says why
  130  ended by Ctrl-C or SIGTERM
"""

from __future__ import annotations

import sys
from pathlib import Path

from qarl.console import entry, note
from qarl.errors import UserError

_EXAMPLE = "qarl report runs/NAME, or qarl report runs/A runs/B together=FILE.html"


def _main(argv: list[str]) -> int:
    keys = [word for word in argv if "=" in word and not Path(word).exists()]
    if unknown := [word for word in keys if not word.startswith("together=")]:
        what = f"there is no key {unknown[0].partition('=')[0]}, and no folder {unknown[0]!r}"
        raise UserError(what, where="command line", fix=f"write {_EXAMPLE}")
    pages = [word.removeprefix("together=") for word in argv if word.startswith("together=")]
    runs = [word for word in argv if not word.startswith("together=")]
    fix = f"write {_EXAMPLE}"
    if "" in pages:
        raise UserError("together has no value", where="command line", fix=fix)
    if not runs:
        raise UserError("no run folder was given", where="command line", fix=fix)
    if pages and not pages[0].endswith(".html"):
        what = f"together={pages[0]} is not the name of an HTML file"
        raise UserError(
            what,
            where="command line",
            why="an existing file of that name would be replaced",
            fix=fix,
        )
    from qarl.checkpoint.storage import METRICS_FILE
    from qarl.checkpoint.trl_folder import refuse_trl
    from qarl.report.damage import damage
    from qarl.report.page import check_comparison, write_comparison, write_report

    for page in pages:
        check_comparison(Path(page))
    for run in runs:
        if not (Path(run) / METRICS_FILE).is_file():
            refuse_trl(Path(run), run, "look at its curves where TRL's report_to has logged them")
    for text in [text for run in runs for text in damage(run)]:
        note(text)
    for path in [write_comparison(runs, pages[0])] if pages else map(write_report, runs):
        print(path)
    return 0


main, describe = entry(_main, __doc__)


if __name__ == "__main__":
    sys.exit(main())
