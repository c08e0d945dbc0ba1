"""mean@k, its 95% interval, and the paired difference of two models.

The prompts are the sample: responses to one prompt are alike, so k responses to N prompts are not k N independent ones
(arXiv 2411.00640). The interval is Wilson's, which stays within 0 and 1 and has a width where all scores are equal. Its
number of trials is the one that would give the variance measured between the prompts; for k = 1 it is N - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z = 1.959963984540054  # the 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def interval(means: Sequence[float]) -> Estimate:
    """Return the mean of `means`, the mean score of each prompt. Scores outside 0 to 1 get a normal interval."""
    if not all(0 <= value <= 1 for value in means):
        return normal(means)
    mean = fmean(means)
    error = standard_error(means)
    trials = mean * (1 - mean) / error**2 if error else len(means)
    scale = 1 + Z**2 / trials
    centre = (mean + Z**2 / (2 * trials)) / scale
    variance = mean * (1 - mean) / trials + Z**2 / (4 * trials**2)
    half = Z / scale * math.sqrt(variance)
    low = max(0.0, min(mean, centre - half))
    high = min(1.0, max(mean, centre + half))
    return Estimate(mean, low, high)


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return first - second, prompt by prompt."""
    return [a - b for a, b in zip(first, second, strict=True)]


def normal(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, with a normal interval."""
    mean = fmean(values)
    error = standard_error(values)
    return Estimate(mean, mean - Z * error, mean + Z * error)


def standard_error(means: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single prompt, whose spread is unknown."""
    return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def average(sets: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the mean of the sets' means, each set counting once, with a normal interval."""
    mean = fmean(fmean(means) for means in sets.values())
    variance = sum(standard_error(means) ** 2 for means in sets.values())
    error = math.sqrt(variance) / len(sets)
    return Estimate(mean, mean - Z * error, mean + Z * error)
