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
    steps = []
    values = []
    for entry in entries:
        value = as_number(entry.get(key))
        if value is None or not abs(value) <= LARGEST:
            continue
        if positive and value <= 0:
            continue
        steps.append(entry["step"])
        values.append(value)
    return np.asarray(steps), np.asarray(values, dtype=float)
