"""One figure of a suite: reward, held-out accuracy and k3 over the steps, each arm's mean over seeds with its range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qarl.metrics.plots import trailing_mean
from qarl.metrics.series import series

PANELS = (
    ("critic/score/mean", "mean reward of sampled responses", False),
    ("val/accuracy", "held-out accuracy, greedy", False),
    ("mismatch/k3", "k3 KL(rollout‖trainer), nats per token", True),
)
# Okabe and Ito's palette without its yellow, which is hard to see on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", "--", ":")
WINDOW_SHARE = 1 / 12


def curves_of(history: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return what the figure shows of one run: for each metric its [step, value] pairs, to six significant digits."""
    points = {metric: zip(*series(history, metric), strict=True) for metric, _, _ in PANELS}
    return {
        metric: [[int(step), float(f"{value:.6g}")] for step, value in pairs]
        for metric, pairs in points.items()
    }


def plot_suite(runs: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write one PNG with a panel for each metric and a line for each arm. Runs without curves are left out.

    `runs`: mappings with `arm`, and `curves` as `curves_of` gives them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for axes, (metric, label, log) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for place, arm in enumerate(dict.fromkeys(run["arm"] for run in runs)):
            steps, stacked = seeds_of([run for run in runs if run["arm"] == arm], metric)
            if not len(steps):
                continue
            color = COLORS[place % len(COLORS)]
            style = STYLES[place // len(COLORS) % len(STYLES)]
            axes.plot(steps, stacked.mean(0), style, color=color, label=f"{arm} ({len(stacked)})")
            axes.fill_between(
                steps, stacked.min(0), stacked.max(0), color=color, alpha=0.12, linewidth=0
            )
        axes.set_title(label)
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
        if log:
            axes.set_yscale("log")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def seeds_of(runs: Sequence[Mapping[str, Any]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that all seeds have, and values [seeds, steps]: trailing means if there are many steps."""
    curves = [dict(map(tuple, run.get("curves", {}).get(metric, ()))) for run in runs]
    curves = [curve for curve in curves if curve]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    stacked = np.asarray([[curve[step] for step in common] for curve in curves])
    window = round(len(common) * WINDOW_SHARE)
    if window > 1:
        stacked = np.asarray([trailing_mean(row, window) for row in stacked])
    return np.asarray(common), stacked
