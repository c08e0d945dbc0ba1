"""Makes every check, topic by topic, and shows the findings as text or as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, get_args

from qarl.checks import run
from qarl.checks.machine import Machine
from qarl.checks.registry import Finding, RunInputs, Status, examine
from qarl.config import Config
from qarl.console import terminal_width
from qarl.doctor import machine, model

TOPICS = (
    *("values", "backend", "machine", "packages", "model", "weights", "ignore list", "layer sizes", "kernels"),
    *("published tensors", "memory", "disk", "data", "loss"),
)
CHECKS = (*run.CHECKS, *machine.CHECKS, *model.CHECKS)
STATUSES: tuple[Status, ...] = get_args(Status)
_WIDTH = 118


def run_checks(config: Config, target: Machine, *, threads_given: str | None = None) -> Report:
    """Make every check for `config` on `target`, without starting an engine, loading weights or writing files.

    `threads_given`: OMP_NUM_THREADS before this process set it.
    """
    inputs = RunInputs(config, target, plan=True, threads_given=threads_given)
    findings = sorted(examine(inputs, CHECKS), key=lambda finding: TOPICS.index(finding.topic))
    return Report(config.name, target.name, tuple(findings))


@dataclass(frozen=True)
class Report:
    """All findings, ordered by topic."""

    name: str
    target: str
    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if the run would fail, else 0."""
        return 1 if self.count("error") else 0

    def __str__(self) -> str:
        lines = [f"{self.name}, on {self.target}"]
        topic = None
        for finding in self.findings:
            if finding.topic != topic:
                topic = finding.topic
                lines += ["", topic]
            lines.append(as_text(finding))
        counts = ", ".join(f"{self.count(status)} {status}" for status in STATUSES)
        verdict = "the run would fail" if self.exit_code else "nothing was found that would stop the run"
        return "\n".join([*lines, "", f"{verdict}: {counts}"])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types: exit code, counts, and one mapping per finding, without empty fields."""
        findings = [{key: value for key, value in asdict(finding).items() if value} for finding in self.findings]
        counts = {status: self.count(status) for status in STATUSES}
        about = {"name": self.name, "target": self.target, "exit_code": self.exit_code}
        return {**about, "counts": counts, "findings": findings}


def as_text(finding: Finding) -> str:
    text = _wrapped(finding.what, f"  {finding.status:8} ", " " * 11)
    for label in ("where", "why", "fix"):
        if value := getattr(finding, label):
            text += "\n" + _wrapped(f"{label}: {value}", " " * 11, " " * 13)
    return "\n".join([text, *(" " * 11 + line for line in finding.lines)])


def _wrapped(text: str, first: str, rest: str) -> str:
    width = terminal_width(_WIDTH)
    wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=rest)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)
