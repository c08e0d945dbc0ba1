"""The metrics that docs/lookup/glossary.md explains."""

from __future__ import annotations

import re

from checkout import ROOT


def glossary_metrics() -> set[str]:
    """Full names: a name that begins with `_` or `/` replaces the end of the name before it."""
    page = (ROOT / "docs/lookup/glossary.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for row in re.findall(r"^\| (`[a-z_]+/.*?) \|", page, flags=re.MULTILINE):
        whole = ""
        for name in re.findall(r"`([\w/]+)`", row):
            whole = whole[: whole.rindex(name[0])] + name if name[0] in "_/" else name
            names.add(whole)
    return names
