"""Repeated measurements in three numbers, and the time of a whole model from two depths.

`low` and `high` are the 95% prediction interval about the median: where one more measurement on the same machine is to
be expected, if measurements are normal, median ± t s sqrt(1 + 1/n) with Student's t of n - 1 degrees of freedom. It is
wide for three measurements, as it must be: three say little about spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypedDict

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5% quantiles for 1 to 15 degrees of freedom; from there 2.131 is a little too wide."""


class Spread(TypedDict):
    median: float
    low: float
    high: float
    samples: list[float]


def spread(samples: Sequence[float]) -> Spread:
    """Of two measurements or more."""
    values = [float(value) for value in samples]
    n, median = len(values), statistics.median(values)
    t = STUDENT_T[min(n - 1, len(STUDENT_T)) - 1]
    half = t * statistics.stdev(values) * (1 + 1 / n) ** 0.5
    return {"median": median, "low": median - half, "high": median + half, "samples": values}


def ratios(base: Sequence[float], other: Sequence[float]) -> Spread:
    """base / other round by round: what slows both in a round falls out."""
    return spread([a / b for a, b in zip(base, other, strict=True)])


def overlap(a: Spread, b: Spread) -> bool:
    """Whether two runs agree: the intervals meet."""
    return a["low"] <= b["high"] and b["low"] <= a["high"]


def extrapolate(shallow: Sequence[float], deep: Sequence[float], depths: tuple[int, int], full: int) -> Spread:
    """The time at depth `full`, from the times of each round at two depths, taken as fixed + layers * per_layer."""
    first, second = depths
    scale = (full - first) / (second - first)
    return spread([a + (b - a) * scale for a, b in zip(shallow, deep, strict=True)])


def per_layer(shallow: Sequence[float], deep: Sequence[float], depths: tuple[int, int]) -> tuple[Spread, Spread]:
    """(time of one layer, time of what does not depend on depth: embedding, lm_head, the engine's own), by round."""
    first, second = depths
    slopes = [(b - a) / (second - first) for a, b in zip(shallow, deep, strict=True)]
    fixed = [a - first * slope for a, slope in zip(shallow, slopes, strict=True)]
    return spread(slopes), spread(fixed)
