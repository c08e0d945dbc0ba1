"""Watch a run while it is logged: report warning signs, and recommend a width for TBPO's bands.

Each warning sign (`qarl.metrics.warning_signs`) is printed and written as a line to warnings.jsonl in the run folder.
A line has the keys of `WarningSign`: sign, step, since_step, text, remedy. When a run resumes, the state and the file
are rebuilt from the metrics of the steps before the resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from qarl.checkpoint.storage import writing
from qarl.metrics.warning_signs import SignFinder, WarningSign

WARNINGS_FILE = "warnings.jsonl"
ADVICE_AFTER = 5
"""After this number of training steps, a run recommends bands that would leave 5% of the responses outside."""
_ADVISED, _FACTOR = "actor/band_p95_after_first", "actor/band_factor_p95_after_first"
_OUTSIDE = "actor/inside_band_frac_after_first"


class RunWatch:
    """`after` takes the metrics of each step and returns the messages to print."""

    def __init__(self, run_dir: str | Path, history: Sequence[Mapping[str, Any]] = ()) -> None:
        """`history`: metrics of the steps before a resume, in order, each with `step`. Write warnings.jsonl for them,
        or remove the file if there are no warnings. Raise StorageError if that fails."""
        self._path = Path(run_dir) / WARNINGS_FILE
        self._signs = SignFinder()
        self._bands: list[tuple[float, float, float]] = []
        before = [warning for entry in history for warning in self._add(int(entry["step"]), entry)]
        with writing(self._path):
            if before:
                self._path.write_text("".join(map(_line, before)), encoding="utf-8")
            else:
                self._path.unlink(missing_ok=True)

    def after(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return new messages after this step: warning signs and, once per run, advice about bands.

        Raise StorageError if warnings.jsonl cannot be written."""
        known = len(self._bands)
        found = self._add(step, metrics)
        if found:
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(map(_line, found))
        advice = [band_advice(self._bands)] if known < len(self._bands) == ADVICE_AFTER else []
        return [*map(str, found), *advice]

    def _add(self, step: int, metrics: Mapping[str, Any]) -> list[WarningSign]:
        if len(self._bands) < ADVICE_AFTER and _FACTOR in metrics and _ADVISED in metrics:
            self._bands.append((metrics[_ADVISED], metrics[_FACTOR], metrics.get(_OUTSIDE, 1.0)))
        return self._signs.add(step, metrics)


def band_advice(steps: Sequence[tuple[float, float, float]]) -> str:
    """Return one line about the bands. `steps`: three metrics of each step, `actor/band_p95_after_first`,
    `band_factor_p95_after_first` and `inside_band_frac_after_first`."""
    at_reference, factor, inside = (median(values) for values in zip(*steps, strict=True))
    if factor == 0:
        return "bands: no sequence ratio has changed yet, so no width can be recommended"
    return (
        f"bands: {1 - inside:.0%} of the responses are outside their band (after the first mini-batch, median of "
        f"{len(steps)} steps); actor.seq_clip_ratio_* and actor.neg_seq_clip_ratio_* times {factor:.2g} would leave 5% "
        f"outside, and so would {at_reference:.2g} at actor.band_reference_length with actor.band_scaling=length"
    )


def _line(warning: WarningSign) -> str:
    return json.dumps(asdict(warning), ensure_ascii=False) + "\n"
