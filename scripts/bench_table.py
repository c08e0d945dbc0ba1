"""Write the tables of Markdown files from the JSON of `python -m qarl.bench`.

    python scripts/bench_table.py README.md

A table stands between `<!-- bench: FILE.json -->` and `<!-- /bench -->`; FILE is taken from the repository's root. One
that has not been measured yet is left as it is, and named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from qarl.bench.report import kernel_tables, step_tables

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- bench: (\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def rewrite(text: str, root: Path) -> tuple[str, list[str]]:
    """`text` with its tables made from their files, and the files that are not there."""
    missing: list[str] = []

    def table(match: re.Match[str]) -> str:
        path = root / match[2]
        if not path.is_file():
            missing.append(match[2])
            return match[0]
        document = json.loads(path.read_text(encoding="utf-8"))
        table = (step_tables if "kind" in document else kernel_tables)(document)
        return f"{match[1]}{table}{match[3]}"

    return _BLOCK.sub(table, text), missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="Markdown files")
    args = parser.parse_args(argv)
    for file in args.files:
        text, missing = rewrite(file.read_text(encoding="utf-8"), ROOT)
        file.write_text(text, encoding="utf-8")
        for name in missing:
            print(f"{file}: {name} is not there, its table is as it was", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
