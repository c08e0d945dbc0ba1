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


def replace_tables(text: str, kind: str, table: Callable[[str], str]) -> str:
    """Return `text` with `table(NAME)` between each `<!-- KIND: NAME -->` and `<!-- /KIND -->`."""
    block = re.compile(rf"(<!-- {kind}: (\S+) -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text)


def bench_table(file: str) -> str:
    document = json.loads((ROOT / file).read_text(encoding="utf-8"))
    return (step_tables if "kind" in document else kernel_tables)(document)


def main(kind: str, table: Callable[[str], str], description: str | None) -> None:
    """Replace the tables (`replace_tables`) of the pages that the command line names."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files")
    for page in parser.parse_args().pages:
        page.write_text(
            replace_tables(page.read_text(encoding="utf-8"), kind, table), encoding="utf-8"
        )


if __name__ == "__main__":
    main("bench", bench_table, __doc__)
