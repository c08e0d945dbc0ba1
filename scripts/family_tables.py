"""Write the tables of docs/lookup/results/models.md, from the result of the proof `family_keys`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench_table import replace_tables

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.proofs.families import ALL, Row, results, rotary_rows, rows
from qarl.bench.report import markdown_table
from qarl.families.measured import LARGEST_SHARE

PAGE = Path(__file__).resolve().parents[1] / "docs/lookup/results/models.md"
_LEVELS = ("W4A16 at `off`", "at `linears`", "at `model`", "BF16 at `linears`", "at `model`")


def by_family() -> dict[str, dict[str, Row]]:
    """Return family -> name of a row -> what was measured."""
    cases: dict[str, dict[str, Row]] = {}
    for family, name, row in results():
        cases.setdefault(family, {})[name] = row
    return cases


def share(row: Row) -> float:
    """The larger of a row's mean |δ| at `linears` in W4A16 and in BF16, as a fraction of that at `off` in W4A16."""
    return float(max(row[scheme]["linears"] for scheme in ("w4a16", "bf16")) / row["w4a16"]["off"])


def agrees(row: Row) -> bool:
    """Whether a row trained, within the limit of a family."""
    return (
        "w4a16" in row
        and not any("stopped" in figures for figures in row.values())
        and share(row) <= LARGEST_SHARE
    )


def key_rows(cases: dict[str, dict[str, Row]]) -> Iterator[Sequence[str]]:
    for family in ALL:
        for name in rows(family):
            row = cases.get(family, {}).get(name, {})
            if "w4a16" in row and name != "defaults" and name not in rotary_rows():
                ignored = row["w4a16"]["ignored"]
                yield (
                    family,
                    f"`{name}`",
                    *_levels(row),
                    ignored if isinstance(ignored, str) else _mean(ignored),
                )


def embedding_rows(cases: dict[str, dict[str, Row]]) -> Iterator[Sequence[str]]:
    for name in rotary_rows():
        measured = {family: cases[family][name] for family in ALL if name in cases.get(family, {})}
        accepted = [family for family, row in measured.items() if "w4a16" in row]
        worst = f"{max(share(measured[family]) for family in accepted):.3f}" if accepted else ""
        refused = [family for family in measured if family not in accepted]
        yield (
            name.removeprefix("rotary "),
            _some(accepted, measured),
            worst,
            _some(refused, measured),
        )


def refused_rows(cases: dict[str, dict[str, Row]]) -> Iterator[Sequence[str]]:
    for family in ALL:
        names = [
            name
            for name, row in cases.get(family, {}).items()
            if "refused" in row and name not in rotary_rows()
        ]
        yield family, ", ".join(f"`{name}`" for name in names)


TABLES = {
    "keys": (("family", "keys", *_LEVELS, "one side ignores the key"), key_rows),
    "rotary": (
        ("rotary embedding", "accepted", "largest share of `off`", "refused"),
        embedding_rows,
    ),
    "refused": (("family", "refused by name"), refused_rows),
}
"""Name of a table -> its heads, and what makes its rows."""


def _levels(row: Row) -> list[str]:
    low = row["w4a16"]
    bf16 = row["bf16"]
    values = low["off"], low["linears"], low.get("model"), bf16["linears"], bf16.get("model")
    return [_mean(value) for value in values]


def _mean(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _some(chosen: Sequence[str], every: Iterable[str]) -> str:
    """The chosen families, or those that are not chosen if they are fewer."""
    others = [family for family in every if family not in chosen]
    if chosen and len(others) < len(chosen):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(chosen)


def page() -> str:
    """The page with its tables as the results say."""
    cases = by_family()

    def table(name: str) -> str:
        heads, rows_of = TABLES[name]
        return f"{markdown_table(heads, rows_of(cases))}\n"

    return replace_tables(PAGE.read_text(encoding="utf-8"), "family_tables", table)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
