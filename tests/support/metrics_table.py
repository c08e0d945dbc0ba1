"""The table of docs/lookup/verl.md that says of every metric whether both backends log it, and equally."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from checkout import ROOT

KINDS = ("equal", "local", "verl", "measured")


@cache
def rows() -> dict[str, str]:
    """Pattern of a name -> its kind, the first word of the row's second cell. Earlier rows come first."""
    page = (ROOT / "docs/lookup/verl.md").read_text(encoding="utf-8")
    table = page.split("| metrics | in the two backends |")[1].split("\n\n")[0]
    found = {}
    for names, text in re.findall(r"^\| (`.*?) \| (.*) \|$", table, flags=re.MULTILINE):
        kind = re.match(r"\w+", text)
        assert kind is not None and kind[0] in KINDS, text
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, name
            found[name] = kind[0]
    return found


def kind_of(metric: str) -> str | None:
    """The kind of the first row that matches, or None."""
    return next((kind for pattern, kind in rows().items() if fnmatchcase(metric, pattern)), None)


def misplaced(metrics: Iterable[str], backend: str) -> list[str]:
    """The metrics logged by `backend` of which the table says nothing, or that only the other backend logs them."""
    other = {"local": "verl", "verl": "local"}[backend]
    return sorted(metric for metric in metrics if kind_of(metric) in (None, other))
