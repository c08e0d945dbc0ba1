"""One metric of a run's entries in metrics.jsonl, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def series(entries: Sequence[Mapping[str, Any]], key: str, *, positive: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric. Skip values that are not finite and, if `positive`, values up to 0."""
    points = [
        (entry["step"], float(entry[key]))
        for entry in entries
        if isinstance(entry.get(key), (int, float)) and math.isfinite(entry[key]) and not (positive and entry[key] <= 0)
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps), np.asarray(values, dtype=float)
