"""Repeated measurements as a mean with its 95% confidence interval, and the time of a whole model from two depths.

Rounds of one process share whatever that process got: its memory's pages, its place on the machine. A second run has
other processes, so it may differ by more than rounds do (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time,
ISMM 2013). With several launches the unit of all statistics is therefore the launch, by the median of its rounds, which
one disturbed round does not move; with a single launch it is the round, and the interval says nothing about a launch
more. `low` and `high` are mean ± t s / sqrt(n) over n units, with Student's t of n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypedDict

Samples = Sequence[Sequence[float]]
"""Of each launch those of its rounds."""
CONFIDENCE = 0.95
_INTERVALS = 600


class Spread(TypedDict):
    mean: float
    low: float
    high: float
    samples: list[list[float]]


def units(samples: Samples) -> list[float]:
    """What counts as one measurement: a launch, by its median; of a single launch its rounds."""
    if len(samples) == 1:
        return [float(value) for value in samples[0]]
    return [float(statistics.median(rounds)) for rounds in samples]


def spread(samples: Samples) -> Spread:
    """Of two launches or more, or two rounds or more of one."""
    values = units(samples)
    mean = statistics.fmean(values)
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "samples": [list(rounds) for rounds in samples]}


def ratios(base: Samples, other: Samples) -> Spread:
    """base / other round by round: what slows both in a round falls out."""
    return spread(_by_round(lambda a, b: a / b, base, other))


def extrapolate(shallow: Samples, deep: Samples, depths: tuple[int, int], full: int) -> Spread:
    """The time at depth `full`, from the times of each round at two depths, taken as fixed + layers * per_layer."""
    first, second = depths
    scale = (full - first) / (second - first)
    return spread(_by_round(lambda a, b: a + (b - a) * scale, shallow, deep))


def per_layer(shallow: Samples, deep: Samples, depths: tuple[int, int]) -> tuple[Spread, Spread]:
    """(time of one layer, time of what does not depend on depth: embedding, lm_head, the engine's own), by round."""
    first, second = depths
    layer = _by_round(lambda a, b: (b - a) / (second - first), shallow, deep)
    fixed = _by_round(lambda a, slope: a - first * slope, shallow, layer)
    return spread(layer), spread(fixed)


def _by_round(of_two: Callable[[float, float], float], a: Samples, b: Samples) -> list[list[float]]:
    return [
        [of_two(one, other) for one, other in zip(mine, theirs, strict=True)] for mine, theirs in zip(a, b, strict=True)
    ]


def p_value(a: Spread, b: Spread) -> float:
    """Of Welch's t-test: how often two runs of one thing would differ by this much or more, if units are normal."""
    error, freedom = _welch(a, b)
    difference = abs(a["mean"] - b["mean"])
    if not error:
        return 1.0 if difference == 0 else 0.0
    return two_sided_tail(difference / error, freedom)


def detectable(a: Spread, b: Spread, level: float) -> float:
    """The difference of the means that would have had a p-value of `level`."""
    error, freedom = _welch(a, b)
    return student_t(freedom, level) * error if error else 0.0


def _welch(a: Spread, b: Spread) -> tuple[float, float]:
    """(standard error of the difference of the means, degrees of freedom)"""
    counted = [units(one["samples"]) for one in (a, b)]
    errors = [statistics.variance(values) / len(values) for values in counted]
    if not sum(errors):
        return 0.0, 1.0
    shares = sum(error**2 / (len(values) - 1) for error, values in zip(errors, counted, strict=True))
    return math.sqrt(sum(errors)), sum(errors) ** 2 / shares


@cache
def student_t(freedom: float, level: float = 1 - CONFIDENCE) -> float:
    """The value that |t| exceeds in so many cases."""
    low, high = 0.0, 1.0
    while two_sided_tail(high, freedom) > level:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_tail(middle, freedom) > level else (low, middle)
    return high


def two_sided_tail(t: float, freedom: float) -> float:
    """P(|T| > t) of Student's t, also for degrees of freedom that are no whole number, by Simpson's rule.

    With T = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), up to a factor.
    """
    whole = _integral(0.0, freedom)
    return _integral(math.atan(t / math.sqrt(freedom)), freedom) / whole


def _integral(start: float, freedom: float) -> float:
    """Of cos(x)^(freedom - 1) from `start` to pi / 2, with pi / 2 - x = u^2: smooth at the end for any freedom >= 1."""
    step = math.sqrt(math.pi / 2 - start) / _INTERVALS
    heights = [2 * u * math.sin(u * u) ** (freedom - 1) for u in (i * step for i in range(_INTERVALS + 1))]
    return (heights[0] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]) + heights[-1]) * step / 3
