"""Which metrics have a line in which chart."""

from __future__ import annotations

import pytest

from qarl.metrics.plots import CHARTS

LOGGED = (
    *(
        "val/accuracy",
        "val/accuracy_low",
        "val/accuracy_high",
        "val/accuracy/a",
        "val/accuracy/a_low",
    ),
    *("val/best@2", "val/best@2_low", "val/best@2_high", "val/best@4", "val/maj@4"),
    *("rewards/form/mean", "rewards/right/mean", "val/rewards/form/mean", "critic/score/mean"),
)
LINES = {
    "Held-out accuracy": {"val/accuracy": "accuracy", "val/accuracy/a": "a"},
    "Held-out: best of K answers": {"val/best@2": "2", "val/best@4": "4"},
    "Held-out: answer that most of N give": {"val/maj@4": "4"},
    "Scores of the reward functions": {
        "rewards/form/mean": "form/mean",
        "rewards/right/mean": "right/mean",
    },
}


@pytest.mark.parametrize("title", LINES)
def test_lines(title: str) -> None:
    (chart,) = [chart for chart in CHARTS if chart.title == title]
    assert chart.lines_in(LOGGED) == LINES[title]


def test_a_source_whose_name_ends_like_an_interval() -> None:
    (chart,) = [chart for chart in CHARTS if chart.title == "Held-out accuracy"]
    assert "val/accuracy/math_low" in chart.lines_in(["val/accuracy", "val/accuracy/math_low"])
