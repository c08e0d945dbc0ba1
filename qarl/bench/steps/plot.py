"""PNG of a benchmark of steps: stacked seconds of each phase beside the speed-up over plain BF16, as the paper's
figures 9b and 11 normalise (arXiv 2604.07853)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.bench.steps.tables import RATIOS

STACKED = {
    "steps": ("prefill", "decode", "old_log_prob", "forward", "backward", "optimizer", "quantize", "publish"),
    "trainer": ("old_log_prob", "forward", "backward", "optimizer", "quantize"),
    "publish": ("quantize", "publish"),
    "rollout": ("prefill", "decode"),
}
"""Phases that add up to the whole but for what is between them (rewards, advantages, the batch)."""
SHOWN = {"steps": ("rollout", "step"), "trainer": ("old_log_prob", "update", "step")}


def plot(path: Path, document: Mapping[str, Any]) -> None:
    """Write `path`: one depth only, the whole model where it was extrapolated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in document["results"] if result["layers"] == _depth(document)]
    names = [_name(result) for result in results]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(max(10, 1.3 * len(results)), 5))
    bottom = [0.0] * len(results)
    for phase in STACKED[document["kind"]]:
        heights = [result["phases"].get(phase, {}).get("mean", 0.0) for result in results]
        left.bar(names, heights, bottom=bottom, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left.set(title=f"{document['model']['name']}, {_depth(document)} layers", ylabel="seconds")
    left.legend(fontsize=7)
    _speedups(right, document, results, names)
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=75, labelsize=8)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(f"{document['device']}, {document['date'][:10]}, commit {document['commit']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _speedups(axis: Any, document: Mapping[str, Any], results: Sequence[Any], names: Sequence[str]) -> None:
    phases = SHOWN.get(document["kind"], RATIOS[document["kind"]])
    width = 0.8 / len(phases)
    for number, phase in enumerate(phases):
        found = [result.get("speedup", {}).get(phase) for result in results]
        places = [i + (number - (len(phases) - 1) / 2) * width for i in range(len(names))]
        means = [value["mean"] if value else 0.0 for value in found]
        errors = [value["high"] - value["mean"] if value else 0.0 for value in found]
        axis.bar(places, means, width, yerr=errors, capsize=2, label=phase)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(names)), names)
    highest = max((value["mean"] for r in results for value in r.get("speedup", {}).values()), default=1.0)
    axis.set(title="times as fast as plain BF16", ylim=(0, 1.3 * highest))
    axis.legend(fontsize=7)


def _depth(document: Mapping[str, Any]) -> int:
    """The whole model where it was extrapolated, else the deepest that was measured."""
    return max((result["layers"] for result in document["results"]), default=0)


def _name(result: Mapping[str, Any]) -> str:
    parts = [result["scheme"], result["level"], result.get("batch"), result.get("response_length")]
    return " ".join(str(part) for part in parts if part)
