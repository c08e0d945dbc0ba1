"""One figure of a suite: reward, held-out accuracy and k3 over the steps, each arm's mean over seeds with its range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ablation_suites import Run

from qarl.errors import UserError
from qarl.metrics.plots import series
from qarl.metrics.tracker import read_metrics

PANELS = (
    ("critic/score/mean", "mean reward of sampled responses", False),
    ("val/accuracy", "held-out accuracy, greedy", False),
    ("mismatch/k3", "k3 KL(rollout‖trainer), nats per token", True),
)
# Okabe and Ito's palette without its yellow, which is hard to see on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = ("-", "--", ":")
WINDOW_SHARE = 1 / 12


def plot_suite(folder: Path, runs: Sequence[Run], output: Path) -> None:
    """Write one PNG with a panel for each metric. An arm in a setting is a line; runs without metrics are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for axes, (metric, label, log) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        names = dict.fromkeys((run.setting, run.arm) for run in runs)
        for place, (setting, arm) in enumerate(names):
            members = [run for run in runs if (run.setting, run.arm) == (setting, arm)]
            steps, stacked = seeds_of(folder, members, metric)
            if not len(steps):
                continue
            color, style = COLORS[place % len(COLORS)], STYLES[place // len(COLORS) % len(STYLES)]
            name = " ".join(part for part in (setting, arm) if part)
            axes.plot(steps, stacked.mean(0), style, color=color, label=f"{name} ({len(stacked)})")
            axes.fill_between(steps, stacked.min(0), stacked.max(0), color=color, alpha=0.12, linewidth=0)
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


def seeds_of(folder: Path, runs: Sequence[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that all seeds have, and values [seeds, steps]: trailing means if there are many steps."""
    curves: list[dict[int, float]] = []
    for run in runs:
        try:
            steps, values = series(read_metrics(folder / run.name), metric)
        except UserError:
            continue
        if len(steps):
            curves.append(dict(zip(steps.tolist(), values.tolist(), strict=True)))
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    stacked = np.asarray([[curve[step] for step in common] for curve in curves])
    window = round(len(common) * WINDOW_SHARE)
    if window > 1:
        stacked = np.asarray(
            [[row[max(0, end - window) : end].mean() for end in range(1, len(row) + 1)] for row in stacked]
        )
    return np.asarray(common), stacked
