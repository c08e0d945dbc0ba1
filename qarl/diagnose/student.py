"""Quantiles of Student's t distribution. scipy is not a dependency, and torch's `StudentT` has no quantiles.

The distribution function of a whole number of degrees of freedom is a finite sum (Abramowitz and Stegun, 26.7.3 and
26.7.4); bisection inverts it."""

from __future__ import annotations

import math


def t_tail(t: float, degrees: int) -> float:
    """Return the probability that a t-distributed value is above `t` >= 0."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inside) / 2


def t_quantile(tail: float, degrees: int) -> float:
    """Return the t >= 0 that is exceeded with probability `tail`, from 1e-6 to 0.5."""
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high
