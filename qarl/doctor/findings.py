"""The doctor's findings, grouped by topic, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qarl.console import terminal_width
from qarl.errors import UserError

Status = Literal["ok", "note", "warning", "error"]
STATUSES: tuple[Status, ...] = ("ok", "note", "warning", "error")
"""`error`: the run would fail. `warning`: the run would start, but probably give bad results. `note`: a useful fact, or
a check that was not made."""
_WIDTH = 118


@dataclass(frozen=True)
class Finding:
    """One finding of `topic`. `what`, `where`, `why` and `fix` are as in `UserError`. `lines`: details."""

    topic: str
    status: Status
    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = _wrapped(self.what, f"  {self.status:8} ", " " * 11)
        for label in ("where", "why", "fix"):
            if value := getattr(self, label):
                text += "\n" + _wrapped(f"{label}: {value}", " " * 11, " " * 13)
        return "\n".join([text, *(" " * 11 + line for line in self.lines)])


@dataclass
class Topic:
    """Collects the findings of one topic."""

    name: str
    findings: list[Finding] = field(default_factory=list)

    def ok(self, what: str, lines: Sequence[str] = ()) -> None:
        self._add("ok", what, lines=tuple(lines))

    def note(self, what: str, *, fix: str, why: str | None = None, lines: Sequence[str] = ()) -> None:
        self._add("note", what, why=why, fix=fix, lines=tuple(lines))

    def warning(
        self, what: str, *, fix: str, where: str | None = None, why: str | None = None, lines: Sequence[str] = ()
    ) -> None:
        self._add("warning", what, where=where, why=why, fix=fix, lines=tuple(lines))

    def error(
        self, what: str, *, fix: str, where: str | None = None, why: str | None = None, lines: Sequence[str] = ()
    ) -> None:
        self._add("error", what, where=where, why=why, fix=fix, lines=tuple(lines))

    def refusal(self, error: UserError, status: Status = "error") -> None:
        """Add a finding with the words of `error`, which training would raise."""
        self._add(status, error.what, where=error.where, why=error.why, fix=error.fix)

    def passes(self, check: Callable[..., Any], *arguments: Any) -> bool:
        """Make one of training's checks, and return whether it passes. If it raises UserError, add a finding."""
        try:
            check(*arguments)
        except UserError as error:
            self.refusal(error)
            return False
        return True

    def _add(self, status: Status, what: str, **parts: Any) -> None:
        self.findings.append(Finding(self.name, status, what, **parts))


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
            lines.append(str(finding))
        counts = ", ".join(f"{self.count(status)} {status}" for status in STATUSES)
        verdict = "the run would fail" if self.exit_code else "nothing was found that would stop the run"
        return "\n".join([*lines, "", f"{verdict}: {counts}"])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types: exit code, counts, and one mapping per finding, without empty fields."""
        findings = [{key: value for key, value in asdict(finding).items() if value} for finding in self.findings]
        counts = {status: self.count(status) for status in STATUSES}
        return {
            "name": self.name,
            "target": self.target,
            "exit_code": self.exit_code,
            "counts": counts,
            "findings": findings,
        }


def _wrapped(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text,
        terminal_width(_WIDTH),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
