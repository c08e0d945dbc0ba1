"""The tables of docs/supported_models.md, from the result of the proof `family_keys`.

python scripts/family_tables.py            compare with the page; exit code 1 if it is stale
python scripts/family_tables.py --write    write the tables
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from config_page import main

from benchmarks.proofs.families import ALL, Row, results, rotary_rows, rows
from qarl.align.families import LARGEST_SHARE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "supported_models.md"
_LEVELS = ("W4A16 at `off`", "at `linears`", "at `model`", "BF16 at `linears`", "at `model`")


def by_family() -> dict[str, dict[str, Row]]:
    """Return family -> name of a row -> what was measured."""
    found: dict[str, dict[str, Row]] = {}
    for family, name, row in results():
        found.setdefault(family, {})[name] = row
    return found


def share(row: Row) -> float:
    """The larger of a row's mean |δ| at `linears` in W4A16 and in BF16, as a fraction of that at `off` in W4A16."""
    return float(max(row[scheme]["linears"] for scheme in ("w4a16", "bf16")) / row["w4a16"]["off"])


def agrees(row: Row) -> bool:
    """Whether a row trained, within the limit of a family."""
    return "w4a16" in row and not any("stopped" in found for found in row.values()) and share(row) <= LARGEST_SHARE


def key_table(found: dict[str, dict[str, Row]]) -> Iterator[str]:
    yield from _head("family", "keys", *_LEVELS, "one side ignores the key")
    for family in ALL:
        for name in rows(family):
            row = found.get(family, {}).get(name, {})
            if "w4a16" in row and name != "defaults" and name not in rotary_rows():
                ignored = row["w4a16"]["ignored"]
                yield _line(family, f"`{name}`", *_levels(row), ignored if isinstance(ignored, str) else _mean(ignored))


def rotary_table(found: dict[str, dict[str, Row]]) -> Iterator[str]:
    yield from _head("rotary embedding", "accepted", "largest share of `off`", "refused")
    for name in rotary_rows():
        measured = {family: found[family][name] for family in ALL if name in found.get(family, {})}
        accepted = [family for family, row in measured.items() if "w4a16" in row]
        worst = f"{max(share(measured[family]) for family in accepted):.3f}" if accepted else ""
        refused = [family for family in measured if family not in accepted]
        yield _line(name.removeprefix("rotary "), _some(accepted, measured), worst, _some(refused, measured))


def refused_table(found: dict[str, dict[str, Row]]) -> Iterator[str]:
    yield from _head("family", "refused by name")
    for family in ALL:
        names = [name for name, row in found.get(family, {}).items() if "refused" in row and name not in rotary_rows()]
        yield _line(family, ", ".join(f"`{name}`" for name in names))


TABLES = {"keys": key_table, "rotary": rotary_table, "refused": refused_table}


def _levels(row: Row) -> list[str]:
    low, bf16 = row["w4a16"], row["bf16"]
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


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield "|---" * len(names) + "|"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The page with its tables as the results say."""
    found, text = by_family(), PAGE.read_text()
    for name, table in TABLES.items():
        start, end = f"<!-- family_tables: {name} -->\n", "\n<!-- /family_tables -->"
        before, _, rest = text.partition(start)
        text = before + start + "\n".join(table(found)) + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    sys.exit(main(PAGE, page(), __doc__))
