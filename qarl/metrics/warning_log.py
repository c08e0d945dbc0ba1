"""Report the warning signs of a run, and say how wide TBPO's bands should be.

Each warning sign (`qarl.metrics.warning_signs`) is printed and written as a line to warnings.jsonl in the run folder.
A line has the keys of `WarningSign`: sign, step, since_step, text, remedy. Bands that leave out too many responses are
such a sign, too. When a run resumes, the state and the file are rebuilt from the metrics of the steps before it.

A sequence ratio is a geometric mean over tokens, so its spread is proportional to 1/sqrt(tokens). The paper's bands,
3e-4 to 7e-4 (arXiv 2604.07853, appendix B), are for responses of up to 16384 tokens. Before the run, the doctor scales
them from that length, as `actor.band_scaling=length` does. After some steps, the run has measured which bands it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from qarl.checkpoint.storage import append_lines, writing
from qarl.metrics.warning_signs import SignFinder, WarningSign
from qarl.tbpo.config import TBPOConfig

WARNINGS_FILE = "warnings.jsonl"
ADVICE_AFTER = 5
"""After this number of training steps, a run recommends bands that would leave 5% of the responses outside."""
MOST_OUTSIDE = 0.1
"""If more than this fraction of the responses is outside, the advice is a warning."""
NARROW = "narrow_bands"
_ADVISED, _FACTOR = "actor/band_p95_after_first", "actor/band_factor_p95_after_first"
_OUTSIDE = "actor/inside_band_frac_after_first"
PAPER = TBPOConfig()
"""The paper's bands, with the response length that they are for."""


class WarningLog:
    """`after` takes the metrics of each step and returns the messages to print."""

    def __init__(
        self, run_dir: str | Path, history: Sequence[Mapping[str, Any]] = (), actor: Mapping[str, Any] | None = None
    ) -> None:
        """`history`: metrics of the steps before a resume, in order, each with `step`. Write warnings.jsonl for them,
        or remove the file if there are no warnings. Raise StorageError if that fails. `actor`: the config's section of
        that name; missing keys have the paper's values."""
        self._path, self._actor = Path(run_dir) / WARNINGS_FILE, actor or {}
        self._signs = SignFinder()
        self._bands: list[tuple[float, float, float]] = []
        before = [warning for entry in history for warning in self._add(int(entry["step"]), entry)]
        with writing(self._path):
            self._path.unlink(missing_ok=True)
        self._write(before)

    def after(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return new messages after this step: warning signs and, once per run, advice about bands.

        Raise StorageError if warnings.jsonl cannot be written."""
        known = len(self._bands)
        signs = self._add(step, metrics)
        advised = known < len(self._bands) == ADVICE_AFTER
        self._write(signs)
        if advised and not any(sign.sign == NARROW for sign in signs):
            return [*map(str, signs), band_advice(self._bands, self._actor)[0]]
        return [*map(str, signs)]

    def _write(self, warnings: Sequence[WarningSign]) -> None:
        if warnings:
            append_lines(self._path, map(asdict, warnings))

    def _add(self, step: int, metrics: Mapping[str, Any]) -> list[WarningSign]:
        signs = self._signs.add(step, metrics)
        if len(self._bands) < ADVICE_AFTER and _FACTOR in metrics and _ADVISED in metrics:
            self._bands.append((metrics[_ADVISED], metrics[_FACTOR], metrics.get(_OUTSIDE, 1.0)))
            text, remedy = band_advice(self._bands, self._actor)
            if len(self._bands) == ADVICE_AFTER and remedy:
                signs.append(WarningSign(NARROW, step, step - ADVICE_AFTER + 1, text, remedy))
        return signs


def band_advice(steps: Sequence[tuple[float, float, float]], actor: Mapping[str, Any]) -> tuple[str, str]:
    """Return one line about the bands of a config's section `actor`, and what to set if they are too narrow, or "".

    `steps`: three metrics of each step, `actor/band_p95_after_first`, `band_factor_p95_after_first` and
    `inside_band_frac_after_first`."""
    at_reference, factor, inside = (median(values) for values in zip(*steps, strict=True))
    if factor == 0:
        return "bands: no sequence ratio has changed yet, so no width can be recommended", ""
    text = (
        f"bands: {1 - inside:.0%} of the responses are outside their band and teach nothing (after the first "
        f"mini-batch, median of {len(steps)} steps); bands {factor:.2g} times as wide would leave 5% outside"
    )
    return text, how_to_set(actor, factor, at_reference) if 1 - inside > MOST_OUTSIDE else ""


def bands_in_force(actor: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> width of the bands that take effect, of `actor`, a config's section of that name."""
    settings = asdict(PAPER) | dict(actor)
    names = ["seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high"]
    names += ["seq_clip_ratio_low"] if settings["positive_band"] == "two_sided" else []
    return {name: settings[name] for name in names}


def scaled(width: float, tokens: int, reference: int = PAPER.band_reference_length) -> float:
    """Return the band for a response of `tokens`, if `width` is that for a response of `reference` tokens."""
    return width * math.sqrt(reference / tokens)


def how_to_set(actor: Mapping[str, Any], factor: float, at_reference: float | None = None) -> str:
    """Return the keys to set so that the bands in force become `factor` times as wide.

    `at_reference`: the narrowest band with `actor.band_scaling=length`, an alternative. None: that of the paper."""
    bands = bands_in_force(actor)
    text = "set " + ", ".join(f"actor.{name}={width * factor:.1e}" for name, width in bands.items())
    if actor.get("band_scaling", PAPER.band_scaling) == "length":
        return text
    reference = actor.get("band_reference_length", PAPER.band_reference_length)
    if at_reference is None:
        return f"{text}, or actor.band_scaling=length with the paper's bands, which scales them from {reference} tokens"
    return f"{text}, or actor.band_scaling=length with bands of {at_reference:.1e} (at {reference} tokens)"
