"""Seconds of calls that take turns, and what they are made of: a fit with no negative costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch

from qarl.bench.timing import measure
from qarl.errors import UserError


def fastest_seconds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest of calls that take turns (`qarl.bench.timing`), on CPU: what it takes when nothing disturbs it."""
    times = measure(calls, torch.device("cpu"), seconds=0.0, rounds=rounds)
    return {name: found.minimum for name, found in times.items()}


def nonnegative_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """x, none of it negative, with the least sum of squared relative errors of rows · x to `seconds`.

    Every choice of which costs are zero is tried: exact, and quick for the handful of costs there are here.

    Raises:
        UserError: a time is nothing, negative or not finite, so that no relative error can be taken.
    """
    if not all(math.isfinite(one) and one > 0 for one in seconds):
        raise UserError(f"times of {list(seconds)} s cannot be fitted", where="qarl.bench ceilings",
                        why="one is not above 0", fix="measure again, with more rounds=")  # fmt: skip
    target = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / target[:, None]
    scale = matrix.abs().amax(0).clamp_min(1e-300)
    ones = torch.ones(len(target), 1, dtype=torch.float64)
    best: tuple[float, list[float]] = (float("inf"), [0.0] * matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), size):
            part = matrix[:, chosen] / scale[list(chosen)]
            found = torch.linalg.lstsq(part, ones, driver="gelsd").solution[:, 0]
            if bool((found < 0).any()):
                continue
            error = float((part @ found - 1).square().sum())
            if error < best[0] * (1 - 1e-9):
                values = [0.0] * matrix.shape[1]
                for place, value in zip(chosen, (found / scale[list(chosen)]).tolist(), strict=True):
                    values[place] = value
                best = error, values
    return best[1]
