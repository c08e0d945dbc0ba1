"""Statistics of an ablation: the figures of a run, their mean and spread over seeds, and whether two arms differ.

The test is a permutation test: under the hypothesis that the arm does not matter, every way to deal the runs out to the
arms is equally likely, and p is the share of the ways whose difference of means is at least as large as the measured
one. It assumes no distribution. With few seeds p cannot be small however large the difference: 2 / 70 with four seeds
against four, 2 / 6 with two against two. The smallest possible p is therefore always stated beside it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from qarl.bench.report import markdown_table
from qarl.metrics.series import series

EXACT_WAYS = 20_000
"""Up to this number all ways are counted. Beyond it, this number is drawn at random, always the same ones."""
COLLAPSED_BELOW = 0.5
"""A run has collapsed if its last smoothed reward is below this share of its highest one."""
WINDOW_SHARE = 1 / 12
_CLOSE = 1e-12


def run_figures(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one run from its metrics, one mapping per step. A figure that was not logged is None."""
    accuracy = values(history, "val/accuracy")
    reward = values(history, "critic/score/mean")
    window = max(5, round(len(reward) * WINDOW_SHARE))
    smooth = [
        statistics.fmean(reward[end - window : end]) for end in range(window, len(reward) + 1)
    ]
    return {
        "steps": len(reward),
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if accuracy else None,
        "accuracy_best": max(accuracy, default=None),
        "reward_end": smooth[-1] if smooth else None,
        "reward_peak": max(smooth, default=None),
        "collapsed": smooth[-1] < COLLAPSED_BELOW * max(smooth) if smooth else None,
        "k3": mean(values(history, "mismatch/k3")),
        "abs_max": max(values(history, "mismatch/abs_max"), default=None),
        "rejected": mean(values(history, "correction/rejected_response_frac")),
        "inside_band": mean(values(history, "actor/inside_band_frac_after_first")),
        "entropy_end": mean(values(history, "rollout/entropy")[-window:]),
        "length_end": mean(values(history, "response_length/mean")[-window:]),
        "seconds_per_step": mean(values(history, "timing_s/step")),
    }


def values(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the finite values of a metric."""
    finite: list[float] = series(history, key)[1].tolist()
    return finite


def mean(numbers: Sequence[float]) -> float | None:
    return statistics.fmean(numbers) if numbers else None


def permutation_test(*groups: Sequence[float]) -> tuple[float, float]:
    """Return p of the hypothesis that all groups are the same, and the smallest p that the sizes of two groups allow.

    Each group needs at least one value. The statistic is the sum of squares between groups; of two groups it grows with
    the difference of their means. With equally many values a split and its mirror image count as two ways."""
    pooled = [value for group in groups for value in group]
    sizes = [len(group) for group in groups]
    ends = list(itertools.accumulate(sizes))

    def between(numbers: Sequence[float]) -> float:
        return sum(
            sum(numbers[end - size : end]) ** 2 / size
            for size, end in zip(sizes, ends, strict=True)
        )

    ways = math.comb(len(pooled), sizes[0])
    places = range(len(pooled))
    smallest = (2 if sizes[0] == sizes[-1] else 1) / ways
    measured = between(pooled) - _CLOSE
    if len(groups) == 2 and ways <= EXACT_WAYS:
        splits = (
            [*first, *(set(places) - set(first))]
            for first in itertools.combinations(places, sizes[0])
        )
        return sum(
            between([pooled[place] for place in split]) >= measured for split in splits
        ) / ways, smallest
    rng = random.Random(0)
    hits = 0
    for _ in range(EXACT_WAYS):
        rng.shuffle(pooled)
        hits += between(pooled) >= measured
    return (hits + 1) / (EXACT_WAYS + 1), max(smallest, 1 / (EXACT_WAYS + 1))


def with_spread(numbers: Sequence[float]) -> str:
    """Return mean ± standard deviation (n - 1) in percent, or the only value, or an empty string."""
    spread = f" ± {statistics.stdev(numbers):.1%}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.1%}{spread}" if numbers else ""


COLUMNS = {
    "before": ("accuracy_before", "{:.1%}"),
    "best": ("accuracy_best", "{:.1%}"),
    "reward at the end": ("reward_end", "{:.3f}"),
    "k3": ("k3", "{:.1e}"),
    "max \\|δ\\|": ("abs_max", "{:.2g}"),
    "rejected": ("rejected", "{:.1%}"),
    "inside band": ("inside_band", "{:.0%}"),
    "minutes per run": ("minutes", "{:.1f}"),
}
"""Heading -> figure of a run and its format. A column without any value is left out."""


def table(runs: Sequence[Mapping[str, Any]], baseline: str | None) -> str:
    """Return a Markdown table, one row per arm, in the order in which the arms come in `runs`.

    `runs`: mappings with `arm`, `seed`, `failed` (a reason, or None) and, if not failed, the figures of `run_figures`
    and `minutes`. `baseline`: the arm that the others are tested against."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    columns = {
        heading: column
        for heading, column in COLUMNS.items()
        if any(run.get(column[0]) is not None for run in runs)
    }
    compared = baseline is not None and len(arms) > 1
    head = ["arm", "seeds", "accuracy after", "each seed", *columns, "collapsed"]
    head += [f"against {baseline}", "p (smallest possible)"] if compared else []
    lines = []
    for arm in arms:
        of_arm = [run for run in runs if run["arm"] == arm]
        done = [run for run in of_arm if not run["failed"]]
        after = figures_of(done, "accuracy_after")
        cells = [
            arm,
            _seeds(of_arm),
            with_spread(after),
            ", ".join(f"{value:.1%}" for value in after),
        ]
        cells += [_mean_cell(done, key, form) for key, form in columns.values()]
        cells.append(f"{sum(run['collapsed'] is True for run in done)} of {len(done)}")
        if compared:
            base = [run for run in runs if run["arm"] == baseline and not run["failed"]]
            cells += (
                _comparison(after, figures_of(base, "accuracy_after"))
                if arm != baseline
                else ["", ""]
            )
        lines.append(cells)
    return markdown_table(head, lines)


def _seeds(runs: Sequence[Mapping[str, Any]]) -> str:
    failed = sum(bool(run["failed"]) for run in runs)
    return f"{len(runs)}, {failed} failed" if failed else str(len(runs))


def figures_of(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the figure `key` of the runs that have it."""
    return [run[key] for run in runs if run.get(key) is not None]


def _mean_cell(runs: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    average = mean(figures_of(runs, key))
    return "" if average is None else form.format(average)


def _comparison(figures: Sequence[float], base: Sequence[float]) -> list[str]:
    if not figures or not base:
        return ["", ""]
    p, smallest = permutation_test(figures, base)
    return [
        f"{(statistics.fmean(figures) - statistics.fmean(base)) * 100:+.1f} points",
        f"{p:.3f} ({smallest:.3f})",
    ]
