"""Write the tables of Markdown files from the JSON of `python -m qarl.bench`.

    python scripts/bench_table.py README.md

A table stands between `<!-- bench: FILE.json -->` and `<!-- /bench -->`; FILE is taken from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.bench.report import Result, head, markdown_table, step_tables

ROOT = Path(__file__).resolve().parents[1]


def replace_tables(text: str, kind: str, table: Callable[[str], str]) -> str:
    """Return `text` with `table(NAME)` between each `<!-- KIND: NAME -->` and `<!-- /KIND -->`."""
    block = re.compile(rf"(<!-- {kind}: (\S+) -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text)


def kernel_tables(document: Mapping[str, Any]) -> str:
    """Return a Markdown table of relative times per operation and layer: a line per kernel, a column per m."""
    tops = document["ceilings"]
    parts = [
        f"{head(document)} Ceilings: copy {tops['copy_bytes_per_s'] / 1e9:.0f} GB/s, BF16 product "
        f"{tops['bf16_flop_per_s'] / 1e12:.2f} TFLOP/s. Median times divided by the baseline's (BF16, for quantizers "
        "eager PyTorch); in brackets, the same ratio of the fastest calls."
    ]
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for entry in document["results"]:
        key = (entry["operation"], entry["model"], entry["layer"], entry["n"], entry["k"])
        groups.setdefault(key, []).append(entry)
    for (operation, model, layer, n, k), entries in groups.items():
        parts += [f"**{operation}, {model} {layer} [{n}, {k}]**", _kernel_table(entries)]
    parts += [f"Not measured: {name}: {why}" for name, why in document["not_measured"].items()]
    return "\n\n".join(parts) + "\n"


def _kernel_table(entries: Sequence[Result]) -> str:
    columns = sorted({entry["m"] for entry in entries})
    rows = []
    for scheme, kernel in dict.fromkeys((entry["scheme"], entry["kernel"]) for entry in entries):
        cells = [_cell(entries, scheme, kernel, m) for m in columns]
        rows.append([kernel if scheme == "bf16" else f"{scheme} {kernel}", *cells])
    return markdown_table(["kernel", *(f"M={m}" if m else "time" for m in columns)], rows)


def _cell(entries: Sequence[Result], scheme: str, kernel: str, m: int) -> str:
    at = [entry for entry in entries if entry["m"] == m]
    mine = next((entry for entry in at if (entry["scheme"], entry["kernel"]) == (scheme, kernel)), None)
    if mine is None:
        return ""
    base = next((entry for entry in at if f"{entry['scheme']} {entry['kernel']}" == mine["baseline"]), None)
    if base is None or base is mine:
        seconds = mine["seconds"]["median"]
        return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
    median, fastest = (mine["seconds"][key] / base["seconds"][key] for key in ("median", "minimum"))
    return f"{median:.2f} ({fastest:.2f})"


def bench_table(file: str) -> str:
    document = json.loads((ROOT / file).read_text(encoding="utf-8"))
    return (step_tables if "kind" in document else kernel_tables)(document)


def rewrite(text: str) -> str:
    """Return `text` with its tables made from their files."""
    return replace_tables(text, "bench", bench_table)


def main(rewrite: Callable[[str], str], description: str | None) -> None:
    """Rewrite the pages that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files")
    for page in parser.parse_args().pages:
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(rewrite, __doc__)
