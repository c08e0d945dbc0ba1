"""Says which lines of a run's files are damaged, as a crash, a full disk or a copy that was cut short leaves them.

Summary, plots and report leave such a line out, so without these words a curve would only have a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import METRICS_FILE, lines_of, value_of
from qarl.metrics.tracker import is_step
from qarl.metrics.warning_log import WARNINGS_FILE, is_warning
from qarl.report.samples import SAMPLES_FILE, is_sample

_MOST_NUMBERS = 20
_FILES: dict[str, Callable[[Any], bool]] = {
    METRICS_FILE: is_step,
    SAMPLES_FILE: is_sample,
    WARNINGS_FILE: is_warning,
}
"""The files that have an object a line, and whether a value is one."""


def damage(run_dir: str | Path) -> list[str]:
    """Return a text for each file of the run folder that has damaged lines, which names them."""
    return [text for name in _FILES if (text := damage_of(Path(run_dir) / name))]


def damage_of(path: Path) -> str | None:
    """Return which lines of one of these files are damaged, counted from 1, or None if none are."""
    is_whole = _FILES[path.name]
    numbers = [
        number
        for number, line in enumerate(lines_of(path), start=1)
        if line.strip() and not is_whole(value_of(line))
    ]
    if not numbers:
        return None
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    more = ", ..." if len(numbers) > _MOST_NUMBERS else ""
    return (
        f"lines of {path} that are torn or damaged are left out of summary, plots and report: "
        f"{shown}{more}"
    )
