"""The pages that scripts/gpu_check.py writes from its results: tables and verdicts."""

from __future__ import annotations

import math
from typing import Any

from gpu_parts import PARTS
from gpu_verdicts import verdicts

from qarl.bench.report import kernel_tables, markdown_table, step_tables

Result = dict[str, Any]
"""What is kept of one part: `status`, `why`, `seconds`, `commit`, `output` (lines), `report` (JSON or None), and
`failing` (names of tests)."""


def verdict_table(result: Result, *, cpu: bool) -> str:
    if not result.get("report"):
        return "no verdicts: the kernels were not measured"
    remark = "On a CPU, to try the table: they mean nothing.\n\n" if cpu else ""
    return remark + markdown_table(
        ["bound", "shape", "measured", ""], verdicts(result["report"]["results"])
    )


def markdown(document: dict[str, Any], cpu: bool) -> str:
    """All results, as a page."""
    results = document["parts"]
    rows = [[name, part["status"], f"{part['seconds']:.0f}", part["commit"], part["why"] or ""]
            for name, part in results.items()]  # fmt: skip
    lines = [f"`scripts/gpu_check.sh{' --cpu' if cpu else ''}`, {document['date']}", "",
             markdown_table(["part", "status", "seconds", "commit", ""], rows)]  # fmt: skip
    if "bench" in results:
        lines += ["", "## verdicts", "", verdict_table(results["bench"], cpu=cpu)]
    for name, part in results.items():
        failing = [f"- `{test}`" for test in part.get("failing", ())]
        lines += [
            "",
            f"## {name}",
            "",
            *(["failing:", "", *failing, ""] if failing else []),
            *tables(name, part),
        ]
    return "\n".join(lines) + "\n"


def tables(name: str, result: Result) -> list[str]:
    """Tables of a benchmark, δ of a training run, else the last lines of output."""
    report = result.get("report")
    command = PARTS[name].gpu if name in PARTS else ""
    if report and "qarl.bench" in command:
        return [(kernel_tables if "bench kernels" in command else step_tables)(report)]
    lines = ["```", *result["output"][-60:], "```"]
    if report and "steps" in report:
        keys = [f"mismatch/abs_{name}" for name in ("mean", "max")]
        rows = [
            [i, *(f"{step.get(key, math.nan):.2g}" for key in keys)]
            for i, step in enumerate(report["steps"])
        ]
        return [markdown_table(["step", "mean abs δ", "largest abs δ"], rows), "", *lines]
    return lines
