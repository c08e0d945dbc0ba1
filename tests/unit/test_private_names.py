"""docs/understand/architecture.md lists every private name of vLLM, verl and transformers that the sources use, and
its files."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT
from third_party_uses import package_uses

PACKAGES = ("vllm", "verl", "transformers")
HEADING = "## Private names of other packages"


def private_part(target: str) -> str | None:
    """`vllm.a._b` of `vllm.a._b.c`, or None if no part is private."""
    parts = target.split(".")
    for end, part in enumerate(parts, start=1):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:end])
    return None


def used() -> dict[str, set[str]]:
    """Private name -> the files that use it."""
    files: dict[str, set[str]] = {}
    for use in package_uses():
        name = private_part(use.target)
        if name is not None and use.package in PACKAGES:
            files.setdefault(name, set()).add(use.file)
    return files


def listed() -> list[tuple[list[str], list[str], list[str]]]:
    """The table's rows: names, files, and tests."""
    text = (ROOT / "docs/understand/architecture.md").read_text(encoding="utf-8")
    section = text.split(HEADING)[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [tuple(re.findall(r"`([^`]+)`", row[cell]) for cell in (0, 1, 3)) for row in rows]  # type: ignore[misc]  # three cells


def test_the_table_has_every_private_name_and_no_other():
    assert {name for names, _, _ in listed() for name in names} == used().keys()


@pytest.mark.parametrize("row", listed(), ids=lambda row: row[0][0])
def test_a_row_says_where_and_which_test_notices(row):
    names, files, tests = row
    for name in names:
        assert all(file.startswith(tuple(files)) for file in used()[name]), used()[name]
    assert tests
    for test in tests:
        assert list((ROOT / "tests").rglob(test)), test
