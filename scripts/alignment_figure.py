"""The figure of the README: mean |δ| by scheme and level, from a committed result.

    python scripts/alignment_figure.py       benchmarks/results/levels_cpu.json -> docs/figures/alignment.svg

The same input gives the same bytes, so a test can hold the figure to the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from qarl.schemes import engine_scheme_names

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/levels_cpu.json"
FIGURE = ROOT / "docs/figures/alignment.svg"
LEVELS = {"off": "#d1495b", "linears": "#edae49", "model": "#30638e", "exact": "#003d5b"}
FLOOR = 3e-4
"""The left end of the logarithmic axis; a mismatch of 0 is written out beside it."""


def mean_deltas(document: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Mean |δ| in nats over all sampled tokens of a run, by (scheme, level)."""
    means: dict[tuple[str, str], list[float]] = {}
    for name, run in document["rows"].items():
        scheme, level = name.partition(" | ")[0].split("-", 1)
        means.setdefault((scheme, level), []).append(run["mismatch_abs_mean"])
    return {key: sum(values) / len(values) for key, values in means.items()}


def draw(deltas: dict[tuple[str, str], float], path: Path) -> None:
    """Write horizontal bars, a group for each scheme, as SVG."""
    style: Any = {
        "svg.hashsalt": "qarl",
        "svg.fonttype": "none",
        "font.size": 10,
        "font.family": "sans-serif",
    }
    with rc_context(style):
        figure = Figure(figsize=(7.5, 3.6), layout="constrained")
        axes = figure.subplots()
        place = 0.0
        ticks = []
        for scheme in engine_scheme_names():
            first = place
            for level, colour in LEVELS.items():
                if (scheme, level) not in deltas:
                    continue
                value = deltas[scheme, level]
                axes.barh(place, max(value, FLOOR) - FLOOR, left=FLOOR, height=0.85, color=colour)
                text = f"{level}: {value:.1e}" if value else f"{level}: 0"
                axes.annotate(
                    text,
                    (max(value, FLOOR), place),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                )
                place += 1
            ticks.append((first + place - 1) / 2)
            place += 0.6
        axes.set_xscale("log")
        axes.set_xlim(FLOOR, 0.1)
        axes.set_yticks(ticks, engine_scheme_names())
        axes.invert_yaxis()
        axes.set_xlabel("mean |δ| per token, nats (lower is better)")
        axes.set_title(
            "Log-prob mismatch between trainer and vLLM, by scheme and quant.align", fontsize=11
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(mean_deltas(json.loads(RESULT.read_text(encoding="utf-8"))), FIGURE)
