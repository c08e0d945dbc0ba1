"""Ends a run with the number of checks of each kind. A kind is a file; one test may make many checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

KINDS = {
    "test_aot": "kernels compiled ahead of time",
    "test_choices": "kernel choices",
    "test_publish": "tensors published",
    "test_rehearsal": "parts of a verl run on GPUs",
    "test_runner": "Model Runner V2 and engine arguments",
    "test_align_level": "settings of the engine that level model follows",
    "test_symbols": "symbols and signatures",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    checks: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        folder, _, name = report.nodeid.partition("::")[0].removesuffix(".py").rpartition("/")
        if folder == "tests/gpu_stack":
            checks[name] += dict(report.user_properties).get("checks", 1)
    if checks:
        terminalreporter.section("checks by kind")
        for name, count in sorted(checks.items()):
            terminalreporter.write_line(f"{count:6}  {KINDS.get(name, name)}")
        terminalreporter.write_line(f"{checks.total():6}  in total")
