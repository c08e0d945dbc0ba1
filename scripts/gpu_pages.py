"""The pages that scripts/gpu_check.py writes from its results: tables, verdicts, and the GPU column of README.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, TRAINING
from gpu_verdicts import verdicts

from qarl.bench.report import kernel_tables, markdown_table, step_tables

Result = dict[str, Any]
"""What is kept of one part: `status`, `why`, `seconds`, `commit`, `output` (lines), `report` (JSON or None), and
`failing` (names of tests)."""


def verdict_table(result: Result, *, cpu: bool) -> str:
    if not result.get("report"):
        return "no verdicts: the kernels were not measured"
    said = "On a CPU, to try the table: they mean nothing.\n\n" if cpu else ""
    return said + markdown_table(["bound", "shape", "found", ""], verdicts(result["report"]["results"]))


def markdown(document: dict[str, Any], cpu: bool) -> str:
    """All results, as a page."""
    results = document["parts"]
    rows = [[name, found["status"], f"{found['seconds']:.0f}", found["commit"], found["why"] or ""]
            for name, found in results.items()]  # fmt: skip
    lines = [f"`scripts/gpu_check.sh{' --cpu' if cpu else ''}`, {document['date']}", "",
             markdown_table(["part", "status", "seconds", "commit", ""], rows)]  # fmt: skip
    if "bench" in results:
        lines += ["", "## verdicts", "", verdict_table(results["bench"], cpu=cpu)]
    if cells := {} if cpu else readme_cells(results):
        lines += ["", "## README", "", *(f"| `{scheme}` | {cell} |" for scheme, cell in cells.items())]
    for name, found in results.items():
        failing = [f"- `{test}`" for test in found.get("failing", ())]
        lines += ["", f"## {name}", "", *(["failing:", "", *failing, ""] if failing else []), *tables(name, found)]
    return "\n".join(lines) + "\n"


def tables(name: str, result: Result) -> list[str]:
    """Tables of a benchmark, δ of a training run, else the last lines of output."""
    report, command = result.get("report"), PARTS[name].gpu if name in PARTS else ""
    if report and "qarl.bench" in command:
        return [(kernel_tables if "bench kernels" in command else step_tables)(report)]
    lines = ["```", *result["output"][-60:], "```"]
    if report and "steps" in report:
        head = ["| step | mean abs δ | largest abs δ |", "|---|---|---|"]
        found = [
            [step.get(f"mismatch/abs_{name}", float("nan")) for name in ("mean", "max")] for step in report["steps"]
        ]
        rows = [f"| {i} | {mean:.2g} | {largest:.2g} |" for i, (mean, largest) in enumerate(found)]
        return [*head, *rows, "", *lines]
    return lines


def readme_cells(results: dict[str, Result]) -> dict[str, str]:
    """The GPU column of README's status table, for each scheme that a GPU has trained with."""
    passed = {name for name, found in results.items() if found["status"] == "passed"}
    measured: set[str] = set()
    for name in ("steps", "all_steps"):
        if name in passed:
            measured |= {entry["scheme"] for entry in results[name]["report"]["results"]}
    return {
        scheme: "measured, local backend" if scheme in measured else "tested, local backend"
        for scheme, parts in TRAINING.items()
        if passed & set(parts)
    }


def write_readme(folder: Path, page: Path) -> int:
    """Write the cells of the newest results into the status table; the exit code."""
    found = sorted(folder.glob("gpu_check_*.json"))
    if not found:
        print(f"there is no gpu_check_*.json in {folder}")
        return 1
    cells = readme_cells(json.loads(found[-1].read_text())["parts"])
    text = page.read_text(encoding="utf-8")
    for scheme, cell in cells.items():
        text = re.sub(rf"(?m)^(\| `{scheme}` \|.*\| )[^|]*\|$", rf"\g<1>{cell} |", text)
    page.write_text(text, encoding="utf-8")
    print(f"{found[-1].name}: {', '.join(cells) or 'no scheme'} written to {page.name}")
    return 0
