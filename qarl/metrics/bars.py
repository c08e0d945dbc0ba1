"""Bar charts over a whole run: where the unlikely tokens are, how far updates move them, and the histogram of w.

They are figures 4c, 5b and 4d of the QaRL paper (arXiv 2604.07853), from the metrics of every step. Figure 4c shows
that unlikely tokens are mostly in negative samples, figure 5b that their ratios have the heaviest tail, and figure 4d
how far the mismatch weight w of a response drifts from 1. The paper plots single tokens. QaRL counts them in four
classes of probability, under the old policy and under the current one, which every run can log.

A bar is the mean of its metric over the steps, or the largest value if the metric is a maximum. `BARS` are drawn as PNG
files (`qarl.metrics.plots`) and in report.html.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qarl.checkpoint.storage import write_bytes
from qarl.metrics.series import series
from qarl.metrics.weight_bins import W_BINS
from qarl.tbpo.config import CLASSES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Entries = Sequence[Mapping[str, Any]]
Groups = dict[str, list[float]]
"""Label of a group -> heights of its bars."""

_CLASS_NAMES = ("p < 0.001", "0.001 to 0.01", "0.01 to 0.1", "p > 0.1")
_SIGN_NAMES = {"pos": "A > 0", "neg": "A < 0"}
_POLICY_NAMES = {"": "old policy", "now_": "current policy"}


@dataclass(frozen=True)
class Bars:
    """A chart of grouped bars. `groups`: label -> the metric of each bar, in the order of `names`. A chart without any
    value is left out, and so is a bar without a value. `file`: name of the PNG. `log`: the axis is logarithmic."""

    title: str
    unit: str
    names: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    file: str
    log: bool = False


def _metrics(sign: str, policy: str, what: str) -> list[str]:
    return [f"tokens/{sign}_{policy}{label}_{what}" for label in CLASSES]


def _file(policy: str) -> str:
    return "now" if policy else "old"


def _shares(policy: str) -> Bars:
    groups = {name: _metrics(sign, policy, "frac") for sign, name in _SIGN_NAMES.items()}
    title = f"Tokens by probability under the {_POLICY_NAMES[policy]}"
    return Bars(
        title, "share of that sign", _CLASS_NAMES, groups, f"token_shares_{_file(policy)}", log=True
    )


def _moves(policy: str) -> Bars:
    groups = {}
    for sign, name in _SIGN_NAMES.items():
        groups[f"{name}, mean"] = _metrics(sign, policy, "moved_mean")
        groups[f"{name}, largest"] = _metrics(sign, policy, "moved_max")
    title = f"Moves of tokens by probability under the {_POLICY_NAMES[policy]}"
    return Bars(
        title, "|log ratio|, nats", _CLASS_NAMES, groups, f"token_moves_{_file(policy)}", log=True
    )


_W_NAMES = (
    "to 0.5",
    "to 0.8",
    "to 0.95",
    "to 0.99",
    "to 1.01",
    "to 1.05",
    "to 1.25",
    "to 2",
    "above",
)

_WEIGHTS = Bars(
    "Mismatch weight w of the responses",
    "share",
    _W_NAMES,
    {"w": tuple(W_BINS)},
    "mismatch_weights",
)
BARS = (*map(_shares, _POLICY_NAMES), *map(_moves, _POLICY_NAMES), _WEIGHTS)


def bar_values(metrics: Sequence[str], entries: Entries) -> list[float]:
    """Return the height of the bar of each metric, or NaN if no step has a finite value."""
    heights = []
    for metric in metrics:
        _, values = series(entries, metric)
        over_steps = np.max if metric.endswith("_max") else np.mean
        heights.append(float(over_steps(values)) if values.size else math.nan)
    return heights


def drawn_bars(chart: Bars, runs: Mapping[str, Entries]) -> Groups:
    """Return the groups of bars, or {} if no bar has a height. With several runs a label names the run."""
    groups = {}
    for label, metrics in chart.groups.items():
        for run, entries in runs.items():
            group = label if len(runs) == 1 else f"{label}, {run}"
            groups[group] = bar_values(metrics, entries)
    heights = chain.from_iterable(groups.values())
    return groups if any(map(math.isfinite, heights)) else {}


def plot_bars(chart: Bars, entries: Entries, output: Path) -> Path | None:
    """Write the chart of a run to the folder `output` and return its path, or None if there is nothing to draw."""
    from matplotlib.figure import Figure

    groups = drawn_bars(chart, {"": entries})
    if not groups:
        return None
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=chart.title, ylabel=chart.unit)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    width = 0.8 / len(groups)
    centres = np.arange(len(chart.names))
    for index, (label, heights) in enumerate(groups.items()):
        offset = (index - (len(groups) - 1) / 2) * width
        drawn = np.nan_to_num(heights)
        axes.bar(centres + offset, drawn, width, color=f"C{index}", label=label)
    axes.set_xticks(centres, chart.names)
    if chart.log:
        axes.set_yscale("log")
    if len(groups) > 1:
        axes.legend(frameon=False)
    return save_png(figure, output / f"{chart.file}.png")


def save_png(figure: Figure, path: Path) -> Path:
    """Write a figure of matplotlib to `path`, whole or not at all. Return `path`."""
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    write_bytes(path, image.getvalue())
    return path


def bars_of_report(runs: Mapping[str, Entries]) -> list[dict[str, Any]]:
    """Return the charts for report.html, as JSON types. A bar without a finite height is None."""
    charts = []
    for chart in BARS:
        groups = drawn_bars(chart, runs)
        if not groups:
            continue
        drawn: dict[str, Any] = {"title": chart.title, "unit": chart.unit}
        drawn["names"] = list(chart.names)
        drawn["log"] = chart.log
        drawn["groups"] = [(label, [*map(_short, groups[label])]) for label in groups]
        charts.append(drawn)
    return charts


def _short(height: float) -> float | None:
    return float(f"{height:.4g}") if math.isfinite(height) else None
