"""One metric of a run's entries in metrics.jsonl, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qarl.metrics.summary import as_number

LARGEST = 1e100
"""Of values near the largest float matplotlib cannot compute an axis, and raises."""


def series(
    entries: Sequence[Mapping[str, Any]], key: str, *, positive: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric. Skip values that no axis can show: those that are not finite or larger than
    `LARGEST`, and, if `positive`, values up to 0."""
    values_of = [(entry["step"], as_number(entry.get(key))) for entry in entries]
    points = [
        (step, value)
        for step, value in values_of
        if value is not None and abs(value) <= LARGEST and not (positive and value <= 0)
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps), np.asarray(values, dtype=float)
