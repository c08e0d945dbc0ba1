"""Plot a run from metrics.jsonl, to `plots/*.png` in its folder.

A figure whose metrics were not logged is left out. `CHARTS` has the figures of lines, for these PNG files and for
report.html, which also shows several runs in the same charts. `qarl.metrics.bars` has the figures of bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from qarl.metrics.bars import BARS, Entries, plot_bars, save_png
from qarl.metrics.series import series
from qarl.metrics.tracker import read_metrics
from qarl.metrics.validation import ENDS, MEAN, OF_SOURCE


@dataclass(frozen=True)
class Chart:
    """A chart of lines: metric -> label. A chart whose metrics were not logged is left out.

    `each`: every metric whose name begins with this has a line, too, with the rest of its name as the label, but not
    the ends of intervals. `file`:
    name of its PNG; empty if only the report has it. `smooth`: each step is a faint line, and the trailing mean a bold
    one. `fraction`: the axis is from 0 to 1."""

    title: str
    unit: str
    lines: Mapping[str, str]
    each: str = ""
    file: str = ""
    log: bool = False
    smooth: bool = False
    fraction: bool = False

    def lines_in(self, names: Iterable[str]) -> dict[str, str]:
        """Return metric -> label of the chart's lines in a run that logged the metrics `names`."""
        lines = dict(self.lines)
        if self.each:
            logged = set(names)
            intervals = {f"{name}{end}" for name in logged for end in ENDS}
            found = [name for name in sorted(logged - intervals) if name.startswith(self.each)]
            lines |= {name: name.removeprefix(self.each) for name in found}
        return lines


CHARTS = (
    Chart(
        "Reward of sampled responses",
        "mean reward",
        {"critic/score/mean": "reward"},
        file="reward",
        smooth=True,
    ),
    Chart("Held-out accuracy", "mean reward", {MEAN: "accuracy"}, each=OF_SOURCE, file="accuracy"),
    Chart("Held-out: best of K answers", "mean reward", {}, each="val/best@"),
    Chart("Held-out: answer that most of N give", "mean reward", {}, each="val/maj@"),
    Chart("Scores of the reward functions", "mean score", {}, each="rewards/", smooth=True),
    Chart(
        "Mismatch: k3 KL(rollout‖trainer)",
        "nats per token",
        {"mismatch/k3": "k3"},
        file="k3",
        log=True,
        smooth=True,
    ),
    Chart(
        "Mismatch: |δ| of the sampled tokens",
        "nats",
        {"mismatch/abs_max": "largest", "mismatch/abs_p99": "99%", "mismatch/abs_mean": "mean"},
        log=True,
    ),
    Chart(
        "The two parts of the mismatch of stale tokens",
        "nats, mean of the absolute values",
        {
            "staleness/ratio_abs_mean": "updates since it was sampled",
            "mismatch/of_version_abs_mean": "δ to the weights that sampled",
        },
        smooth=True,
    ),
    Chart(
        "Age of the weights that sampled a token",
        "steps",
        {"staleness/age_max": "largest", "staleness/age_mean": "mean"},
    ),
    Chart(
        "Responses outside their band (no gradient)",
        "share of that sign",
        {
            "actor/pos_outside_band_frac_after_first": "A > 0",
            "actor/neg_outside_band_frac_after_first": "A < 0",
        },
        file="outside_band",
        smooth=True,
        fraction=True,
    ),
    Chart(
        "Sequence ratios",
        "π / π_old",
        {"actor/seq_ratio_max": "largest", "actor/seq_ratio_min": "smallest"},
    ),
    Chart("Gradient norm", "before clipping", {"actor/grad_norm": "norm"}, log=True),
    Chart(
        "Entropy",
        "nats per token",
        {"rollout/entropy": "rollout", "actor/entropy": "trainer"},
        file="entropy",
        smooth=True,
    ),
    Chart(
        "Responses with error tokens",
        "share of that sign",
        {
            "error_tokens/neg_repetitive_frac": "repetitive, A < 0",
            "error_tokens/pos_repetitive_frac": "repetitive, A > 0",
            "error_tokens/neg_garbled_frac": "garbled, A < 0",
            "error_tokens/pos_garbled_frac": "garbled, A > 0",
        },
        file="error_tokens",
        smooth=True,
        fraction=True,
    ),
    Chart(
        "Rejected by the correction",
        "share",
        {
            "correction/rejected_response_frac": "responses",
            "correction/rejected_token_frac": "tokens",
        },
        smooth=True,
    ),
    Chart(
        "Loss contribution C(r) = (1 - r) A of the tokens",
        "by the sign of A",
        {
            "actor/zero_centred_loss_pos": "A > 0",
            "actor/zero_centred_loss_neg": "A < 0",
            "actor/rollout_zero_centred_loss_pos": "A > 0, to the rollout",
            "actor/rollout_zero_centred_loss_neg": "A < 0, to the rollout",
        },
        file="contributions",
        smooth=True,
    ),
    Chart(
        "KL estimates of the tokens' ratios",
        "nats per token",
        {
            "actor/k1": "K1",
            "actor/k3": "K3",
            "actor/rollout_k1": "K1, to the rollout",
            "actor/rollout_k3": "K3, to the rollout",
        },
        file="kl",
        smooth=True,
    ),
    Chart(
        "Response length",
        "tokens",
        {"response_length/mean": "mean", "response_length/max": "longest"},
    ),
    Chart("Learning rate", "", {"actor/lr": "lr", "actor/muon_lr": "Muon's lr"}),
)

LONGEST_LABEL = 40
_PHASES = ("rollout", "reward", "old_log_prob", "update", "quantize", "publish", "eval")
_PARTS_OF_UPDATE = ("forward", "backward", "optimizer")


def plot_run(run_dir: str | Path) -> list[Path]:
    """Write the run's `plots/*.png` and return their paths. Raise UserError if there is no metrics.jsonl."""
    entries = read_metrics(run_dir)
    output = Path(run_dir) / "plots"
    paths = [_plot_lines(chart, entries, output) for chart in CHARTS if chart.file]
    paths += [plot_bars(chart, entries, output) for chart in BARS]
    return [path for path in paths if path is not None]


def _plot_lines(chart: Chart, entries: Entries, output: Path) -> Path | None:
    # The figure class without pyplot, which needs a window system and has global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=chart.title, ylabel=chart.unit)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    window = max(1, len(entries) // 20) if chart.smooth else 1
    lines = chart.lines_in(sorted({name for entry in entries for name in entry}))
    for index, (key, line) in enumerate(lines.items()):
        steps, values = series(entries, key, positive=chart.log)
        if not len(steps):
            continue
        if window > 1:
            axes.plot(steps, values, color=f"C{index}", alpha=0.25, linewidth=1)
            values = trailing_mean(values, window)
        marker = "o" if len(steps) == 1 or not chart.smooth else None
        label = _plain(line) if len(lines) > 1 else None
        axes.plot(steps, values, color=f"C{index}", marker=marker, label=label)
    if not axes.lines:
        return None
    axis = "training step"
    if window > 1:
        axis += f" (bold: mean of the last {window} steps)"
    axes.set_xlabel(axis)
    if chart.log:
        axes.set_yscale("log")
    if chart.fraction:
        axes.set_ylim(-0.02, 1.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return save_png(figure, output / f"{chart.file}.png")


def _plain(label: str) -> str:
    """Return a label that matplotlib shows as it is. It reads text between dollars as a formula, which may be none, and
    leaves out labels that begin with an underscore. A long label would leave no room for the lines."""
    shown = label if len(label) <= LONGEST_LABEL else f"{label[:LONGEST_LABEL]}..."
    if shown.startswith("_"):
        shown = f" {shown}"
    return shown.replace("$", r"\$")


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return, for each value, the mean of this value and up to `window - 1` values before it."""
    means = []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        means.append(values[start:end].mean())
    return np.asarray(means)


def phases_of(entries: Entries) -> list[str]:
    """Return the timed phases in the order of a step, unknown phases last. Parts of `update` are left out, because the
    time of `update` includes them."""
    logged = dict.fromkeys(chain.from_iterable(entries))
    timed = [key.removeprefix("timing_s/") for key in logged if key.startswith("timing_s/")]
    known = [phase for phase in _PHASES if phase in timed]
    not_shown = {*_PHASES, *_PARTS_OF_UPDATE, "step"}
    return known + [phase for phase in timed if phase not in not_shown]
