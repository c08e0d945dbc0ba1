"""Write the tables of Markdown files from the JSON of `python -m qarl.bench`.

    python scripts/bench_table.py README.md

A table stands between `<!-- bench: FILE.json -->` and `<!-- /bench -->`; FILE is taken from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from qarl.bench.report import kernel_tables, step_tables

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def rewrite(text: str) -> str:
    """Return `text` with its tables made from their files."""

    def table(match: re.Match[str]) -> str:
        document = json.loads((ROOT / match[2]).read_text(encoding="utf-8"))
        made = (step_tables if "kind" in document else kernel_tables)(document)
        return f"{match[1]}{made}{match[3]}"

    return _BLOCK.sub(table, text)


def main(rewrite: Callable[[str], str], description: str | None) -> None:
    """Rewrite the pages that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files")
    for page in parser.parse_args().pages:
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(rewrite, __doc__)
