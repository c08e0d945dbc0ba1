"""The figures of an evaluation, and the summary of any history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qarl.checkpoint.storage import json_safe
from qarl.metrics.summary import summarize
from qarl.metrics.tracker import read_metrics
from qarl.metrics.validation import answers_metrics, sources_metrics

STEP = {"timing_s/step": 3.0}


def test_each_prompt_counts_once_in_its_source_and_each_source_once_in_the_mean():
    answers = [
        ("aime", 0, 1.0),
        ("aime", 0, 0.0),
        ("aime", 0, 0.0),
        ("aime", 0, 0.0),
        ("aime", 1, 1.0),
    ]
    answers += [("math", 0, 1.0)] * 4 + [("math", row, 0.0) for row in range(1, 10)]
    assert answers_metrics(answers) == {
        "val/accuracy": (0.625 + 0.1) / 2,
        "val/accuracy/aime": (0.25 + 1.0) / 2,
        "val/accuracy/math": 0.1,
        "val/best@4": 1.0,
        "val/best@4/aime": 1.0,
        "val/best@4/math": 1.0,
    }
    assert answers_metrics([("math", row, float(row < 3)) for row in range(4)]) == {
        "val/accuracy": 0.75
    }
    assert answers_metrics([]) == {}


def test_the_best_of_several_answers():
    """Of prompts with as many answers only; NaN is not left out."""
    answers = [("aime", prompt, reward) for prompt in range(2) for reward in (0.0, prompt, 0.25)]
    answers += [("math", 0, 0.5), ("amc", 0, 0.0), ("amc", 0, 0.0), ("amc", 0, 0.5)]
    metrics = answers_metrics(answers)
    assert metrics["val/best@3/aime"] == (0.25 + 1.0) / 2
    assert metrics["val/best@3/amc"] == 0.5
    assert metrics["val/best@3"] == (0.625 + 0.5) / 2
    assert not any(
        name.startswith("val/best@1") or name.endswith("math") for name in metrics if "best" in name
    )
    undefined = answers_metrics([("aime", 0, math.nan), ("aime", 0, 1.0)])
    assert math.isnan(undefined["val/best@2"])


def test_the_best_of_two_is_not_that_of_four():
    """Of two prompts with two answers one has a right one, and so have both with four."""
    answers = [("amc", 0, 1.0), ("amc", 0, 0.0), ("amc", 1, 0.0), ("amc", 1, 0.0)]
    answers += [("amc", prompt, float(place == 3)) for prompt in (2, 3) for place in range(4)]
    metrics = answers_metrics(answers)
    assert metrics["val/best@2"] == 0.5
    assert metrics["val/best@4"] == 1.0
    assert metrics["val/accuracy"] == (0.5 + 0.0 + 0.25 + 0.25) / 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_source_that_is_not_a_number_is_not_left_out_of_the_mean(bad):
    metrics = sources_metrics({"good": 1.0, "bad": bad})
    assert metrics["val/accuracy/good"] == 1.0
    assert (
        math.isnan(metrics["val/accuracy"]) if math.isnan(bad) else metrics["val/accuracy"] == bad
    )
    assert math.isnan(sources_metrics({"a": math.inf, "b": -math.inf})["val/accuracy"])


def test_names_of_sources():
    metrics = sources_metrics(
        {"openai/gsm8k": 0.1, "two words": 0.2, "": 0.3, " ": 0.4, "acc/mean@1": 0.5}
    )
    names = ["openai/gsm8k", "two words", "''", "' '", "acc/mean@1"]
    assert list(metrics) == ["val/accuracy", *(f"val/accuracy/{name}" for name in names)]


def test_the_summary_has_one_figure_per_source_before_and_after():
    history = [
        {"step": 0} | sources_metrics({"aime": 0.1, "math": 0.5}),
        {"step": 1} | STEP,
        {"step": 2} | STEP | sources_metrics({"aime": 0.2, "math": 0.8}),
        {"step": 3} | STEP,
    ]
    summary = summarize(history)
    expected = {
        "accuracy_before": 0.3,
        "accuracy_after": 0.5,
        "accuracy_mean": "each data source counts once",
        "accuracy_before/aime": 0.1,
        "accuracy_after/aime": 0.2,
        "accuracy_before/math": 0.5,
        "accuracy_after/math": 0.8,
    }
    assert summary["steps"] == 3
    assert {key: value for key, value in summary.items() if key.startswith("accuracy")} == expected


def test_an_evaluation_before_the_training_is_not_one_after_it():
    only_before = summarize([{"step": 0, "val/accuracy": 0.25}, {"step": 1} | STEP])
    assert (only_before["accuracy_before"], only_before["accuracy_after"]) == (0.25, None)
    only_after = summarize([{"step": 7, "val/accuracy": 0.5} | STEP])
    assert (only_after["accuracy_before"], only_after["accuracy_after"]) == (None, 0.5)


HISTORIES: dict[str, list[Any]] = {
    "nothing": [],
    "verl's own names": [{"step": 0, "val-core/aime24/acc/mean@32": 0.1}, {"step": 1} | STEP],
    "no numbers": [
        {"step": 0, "val/accuracy": "?"},
        {"step": 1, "timing_s/step": None, "mismatch/abs_max": [1.0]},
    ],
    "no steps": [{"val/accuracy": 0.5}, {}, {"step": None}],
    "no mappings": [None, 3, "text", [1.0], STEP],
    "not finite": [
        {
            "step": 1,
            "mismatch/abs_max": math.nan,
            "val/accuracy": math.inf,
            "timing_s/step": math.nan,
        }
    ],
    "an integer beyond floats": [{"step": 1, "mismatch/k3": 10**400, "timing_s/step": 10**400}],
    "keys that are no text": [{1: 2.0, "step": 0}, {None: 1.0}],
}


@pytest.mark.parametrize("case", HISTORIES)
def test_no_history_makes_the_summary_fail(case):
    json.dumps(json_safe(summarize(HISTORIES[case])), allow_nan=False)


def test_a_mismatch_that_is_nan_is_not_hidden_by_a_smaller_one():
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        history = [
            {"step": step, "mismatch/abs_max": value} for step, value in enumerate(values, 1)
        ]
        assert math.isnan(summarize(history)["mismatch_abs_max"])


LINES = {
    "torn": '{"step": 2, "val/accu',
    "zeros after a power cut": "\0" * 40,
    "no object": "3",
    "null": "null",
    "a list": '[{"step": 9}]',
    "a step that is no number": '{"step": "last", "x": 1.0}',
    "a step that is null": '{"step": null}',
    "a step that is infinite": '{"step": Infinity}',
    "half a character": '{"step": 9, "x": "\udcc3',
}


@pytest.mark.parametrize("case", LINES)
def test_a_damaged_line_of_metrics_hides_no_other(tmp_path: Path, case: str) -> None:
    lines = [
        '{"step": 1, "timing_s/step": 1.0}',
        LINES[case],
        '{"step": 3, "timing_s/step": 2.0, "x": NaN}',
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(lines), encoding="utf-8", errors="surrogateescape"
    )
    entries = read_metrics(tmp_path)
    assert [entry["step"] for entry in entries] == [1, 3] and math.isnan(entries[1]["x"])
    assert summarize(entries)["steps"] == 2


def test_text_in_a_metric_is_no_number_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "x": "nan", "y": "text", "timing_s/step": 1.0}\n'
    )
    (entry,) = read_metrics(tmp_path)
    assert math.isnan(entry["x"]) and "y" not in entry and entry["timing_s/step"] == 1.0


def test_an_evaluation_at_a_resume_adds_to_its_step_and_hides_only_later_ones(
    tmp_path: Path,
) -> None:
    """verl evaluates when it resumes, and logs that under the step of the checkpoint."""
    lines = [{"step": step, "x": float(step)} | STEP for step in range(1, 6)] + [
        {"step": 3, "val/accuracy": 0.5}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = read_metrics(tmp_path)
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert entries[-1] == {"step": 3, "x": 3.0, "val/accuracy": 0.5} | STEP
    repeated = {"step": 3, "y": 1.0} | STEP
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4} | STEP) + "\n" + json.dumps(repeated) + "\n")
    assert read_metrics(tmp_path)[-1] == repeated, (
        "a step that was trained again leaves nothing of the first time"
    )
