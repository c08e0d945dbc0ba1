"""Report the warning signs of a run.

Each warning sign (`qarl.metrics.warning_signs`) is printed and written as a line to warnings.jsonl in the run folder.
A line has the keys of `WarningSign`: sign, step, since_step, text, remedy. Bands that leave out too many responses are
such a sign, too. When a run resumes, the state and the file are rebuilt from the metrics of the steps before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import append_lines, writing
from qarl.metrics.band_advice import band_advice
from qarl.metrics.first_step import first_step_note
from qarl.metrics.warning_signs import SignFinder, WarningSign

WARNINGS_FILE = "warnings.jsonl"
ADVICE_AFTER = 5
"""After this number of training steps, a run recommends bands that would leave 5% of the responses outside."""
NARROW = "narrow_bands"
_SHOWN = {"since_step", "sign", "text", "remedy"}
"""Keys of a warning sign that the report shows."""
_ADVISED = "actor/band_p95_after_first"
_FACTOR = "actor/band_factor_p95_after_first"
_INSIDE = "actor/inside_band_frac_after_first"


def is_warning(value: Any) -> bool:
    """Return whether the value of a line of warnings.jsonl is what it should be: an object with all that is shown."""
    return isinstance(value, dict) and value.keys() >= _SHOWN


class WarningLog:
    """`after` takes the metrics of each step and returns the messages to print."""

    def __init__(
        self,
        run_dir: str | Path,
        history: Sequence[Mapping[str, Any]] = (),
        actor: Mapping[str, Any] | None = None,
    ) -> None:
        """`history`: metrics of the steps before a resume, in order, each with `step`. Write warnings.jsonl for them,
        or remove the file if there are no warnings. Raise StorageError if that fails. `actor`: the config's section of
        that name; missing keys have the paper's values."""
        self._path = Path(run_dir) / WARNINGS_FILE
        self._actor = actor or {}
        self._signs = SignFinder()
        self._bands: list[tuple[float, float, float]] = []
        self._begins = not history
        before = []
        for entry in history:
            before += self._add(int(entry["step"]), entry)
        with writing(self._path):
            self._path.unlink(missing_ok=True)
        self._write(before)

    def after(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return new messages after this step: warning signs and, once per run, advice about bands and a note if the
        first step teaches nothing.

        Raise StorageError if warnings.jsonl cannot be written."""
        known = len(self._bands)
        signs = self._add(step, metrics)
        advised = known < len(self._bands) == ADVICE_AFTER
        self._write(signs)
        messages = [*map(str, signs)]
        if advised and not any(sign.sign == NARROW for sign in signs):
            messages.append(band_advice(self._bands, self._actor)[0])
        if step == 0:  # the evaluation before the first step
            return messages
        note = first_step_note(metrics) if self._begins else None
        self._begins = False
        return messages if note is None else [*messages, note]

    def _write(self, warnings: Sequence[WarningSign]) -> None:
        if warnings:
            append_lines(self._path, map(asdict, warnings))

    def _add(self, step: int, metrics: Mapping[str, Any]) -> list[WarningSign]:
        signs = self._signs.add(step, metrics)
        has_bands = _FACTOR in metrics and _ADVISED in metrics
        if not has_bands or len(self._bands) == ADVICE_AFTER:
            return signs
        inside = metrics.get(_INSIDE, 1.0)
        self._bands.append((metrics[_ADVISED], metrics[_FACTOR], inside))
        text, remedy = band_advice(self._bands, self._actor)
        if len(self._bands) == ADVICE_AFTER and remedy:
            since = step - ADVICE_AFTER + 1
            signs.append(WarningSign(NARROW, step, since, text, remedy))
        return signs
