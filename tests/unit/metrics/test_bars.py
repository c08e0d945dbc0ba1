"""The bar charts of error tokens and of w: heights by hand, empty classes, NaN, PNG files and the report."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from qarl.metrics.bars import BARS, bar_values, bars_of_report, drawn_bars
from qarl.metrics.plots import plot_run
from qarl.report.page import comparison, contents, page
from qarl.tbpo.config import CLASSES

FILES = [
    "token_shares_old",
    "token_shares_now",
    "token_moves_old",
    "token_moves_now",
    "mismatch_weights",
]


def entries() -> list[dict[str, Any]]:
    """Two steps. Positive samples have no token in the class `tail`, and the second step has NaN in one metric."""
    steps: list[dict[str, Any]] = []
    for step in (1, 2):
        metrics: dict[str, Any] = {
            "step": step,
            "mismatch/w_to_101": 0.75,
            "mismatch/w_to_105": 0.25,
        }
        for sign in ("pos", "neg"):
            for policy in ("", "now_"):
                for place, label in enumerate(CLASSES):
                    name = f"tokens/{sign}_{policy}{label}"
                    empty = sign == "pos" and label == "tail"
                    metrics[f"{name}_frac"] = 0.0 if empty else 0.1 * (place + step)
                    if not empty:
                        metrics[f"{name}_moved_mean"] = 0.01 * (place + step)
                        metrics[f"{name}_moved_max"] = 0.1 * (place + step)
        steps.append(metrics)
    steps[1]["tokens/neg_tail_frac"] = "nan"
    return steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    return folder


def test_a_bar_is_the_mean_over_steps_or_the_largest_of_a_maximum() -> None:
    metrics = ["tokens/neg_rare_frac", "tokens/neg_rare_moved_mean", "tokens/neg_rare_moved_max"]
    assert bar_values(metrics, entries()) == pytest.approx([0.25, 0.025, 0.3])


def test_empty_classes_and_nan_have_no_bar() -> None:
    (tail,) = bar_values(["tokens/pos_tail_moved_mean"], entries())
    assert math.isnan(tail)
    assert bar_values(["tokens/neg_tail_frac"], entries()) == pytest.approx(
        [0.1]
    )  # of the first step alone
    moves = next(chart for chart in BARS if chart.file == "token_moves_old")
    assert math.isnan(drawn_bars(moves, {"": entries()})["A > 0, mean"][0])


@pytest.mark.parametrize(
    "log", [[], [{"step": 1, "tokens/pos_tail_frac": "nan"}], [{"step": 1, "reward": 1.0}]]
)
def test_a_chart_without_a_value_is_left_out(log: list[dict[str, Any]]) -> None:
    assert bars_of_report({"": log}) == []


def test_the_charts_are_png_files(run: Path) -> None:
    paths = plot_run(run)
    assert [path.stem for path in paths] == FILES
    assert all(
        path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths
    )


def test_the_report_has_them_for_one_run_and_for_two(run: Path) -> None:
    charts = contents(run)["bars"]
    assert len(charts) == len(FILES)
    shares = dict(charts[0]["groups"])
    assert shares["A > 0"] == pytest.approx([0.0, 0.25, 0.35, 0.45])
    moves = dict(charts[2]["groups"])
    assert moves["A > 0, mean"][0] is None
    assert moves["A < 0, largest"] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    other = shutil.copytree(run, run.parent / "other")
    two = comparison([run, other], "both")
    weights = two["bars"][-1]
    assert [label for label, _ in weights["groups"]] == ["w, run", "w, other"]
    page(two)  # raises ValueError on NaN
