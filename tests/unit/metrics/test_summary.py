"""The figures of an evaluation, and the summary of any history."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from qarl.checkpoint.storage import json_safe
from qarl.data.reward_outcomes import Scored
from qarl.data.votes import vote_of
from qarl.metrics.estimates import average, interval
from qarl.metrics.summary import summarize
from qarl.metrics.tracker import read_metrics
from qarl.metrics.validation import Answer, answers_metrics, best_of, majority, sources_metrics

STEP = {"timing_s/step": 3.0}


def plain(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics without their intervals."""
    return {name: v for name, v in metrics.items() if not name.endswith(("_low", "_high"))}


def of(rows: Iterable[tuple[Any, ...]]) -> dict[str, float]:
    return answers_metrics(itertools.starmap(Answer, rows))


def test_each_prompt_counts_once_in_its_source_and_each_source_once_in_the_mean():
    answers: list[tuple[Any, ...]] = [
        ("aime", 0, 1.0),
        ("aime", 0, 0.0),
        ("aime", 0, 0.0),
        ("aime", 0, 0.0),
        ("aime", 1, 1.0),
    ]
    answers += [("math", 0, 1.0)] * 4 + [("math", row, 0.0) for row in range(1, 10)]
    assert plain(of(answers)) == {
        "val/accuracy": (0.625 + 0.1) / 2,
        "val/accuracy/aime": (0.25 + 1.0) / 2,
        "val/accuracy/math": 0.1,
        "val/best@2": (0.5 + 1.0) / 2,
        "val/best@2/aime": 0.5,
        "val/best@2/math": 1.0,
        "val/best@4": 1.0,
        "val/best@4/aime": 1.0,
        "val/best@4/math": 1.0,
    }
    assert plain(of(("math", row, float(row < 3)) for row in range(4))) == {"val/accuracy": 0.75}
    assert of([]) == {}


def test_the_best_of_several_answers():
    """Of prompts with as many answers only; NaN is not left out."""
    answers: list[tuple[Any, ...]] = [
        ("aime", prompt, reward) for prompt in range(2) for reward in (0.0, prompt, 0.25)
    ]
    answers += [("math", 0, 0.5), ("amc", 0, 0.0), ("amc", 0, 0.0), ("amc", 0, 0.5)]
    metrics = of(answers)
    assert metrics["val/best@3/aime"] == (0.25 + 1.0) / 2
    assert metrics["val/best@3/amc"] == 0.5
    assert metrics["val/best@3"] == (0.625 + 0.5) / 2
    assert not any(
        name.startswith("val/best@1") or name.endswith("math") for name in metrics if "best" in name
    )
    undefined = of([("aime", 0, math.nan), ("aime", 0, 1.0)])
    assert math.isnan(undefined["val/best@2"]) and math.isnan(undefined["val/best@2_low"])


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_the_best_of_k_is_the_mean_over_all_choices(count: int) -> None:
    rewards = [(7 * i % 5) / 4 for i in range(count)]
    for k in range(1, count + 1):
        choices = [max(choice) for choice in itertools.combinations(rewards, k)]
        assert best_of(rewards, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


@pytest.mark.verl
def test_verls_best_of_n_is_lower_as_it_draws_answers_twice() -> None:
    """Of k = 1 both are the mean. verl draws 4 of 4 with replacement: a right one of four is missed with 0.75**4."""
    pytest.importorskip("verl")
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    infos = {"reward": [0.0, 0.0, 1.0, 0.0]}
    theirs = process_validation_metrics(["a"] * 4, ["u"] * 4, infos)["a"]["reward"]
    assert theirs["mean@4"] == best_of(infos["reward"], 1) == 0.25
    # A thousand draws have a standard error of 0.015.
    assert theirs["best@4/mean"] == pytest.approx(1 - 0.75**4, abs=0.06)
    assert best_of(infos["reward"], 4) == 1.0


VOTES = [
    ([("3", 1.0), ("4", 0.0), ("3", 1.0)], 1.0),
    ([("3", 1.0), ("4", 0.0), ("4", 0.0)], 0.0),
    ([("3", 1.0), ("4", 0.0), ("5", 0.5)], 0.5),
    ([("3", 1.0), (None, 0.0), (None, 0.0)], 1.0),
    ([(None, 1.0), (None, 0.0), (None, 0.5)], 0.5),
]
"""Answers with their rewards, and the reward of the majority."""


@pytest.mark.parametrize(("votes", "expected"), VOTES)
def test_the_majority(votes: list[tuple[str | None, float]], expected: float) -> None:
    group = [Answer("a", 0, reward, vote) for vote, reward in votes]
    assert majority(group) == expected
    metrics = answers_metrics(group)
    assert metrics.get("val/maj@3", "none") == (
        expected if any(vote for vote, _ in votes) else "none"
    )


@pytest.mark.verl
@pytest.mark.parametrize("seed", range(4))
def test_verls_majority_is_the_same_without_ties(seed: int) -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo.metric_utils import calc_maj_val

    draw = random.Random(seed)
    votes = [draw.choice("abc") for _ in range(9)] + ["a"] * 5
    group = [Answer("s", 0, float(vote == "a"), vote) for vote in votes]
    theirs = [{"pred": answer.vote, "val": answer.reward} for answer in group]
    assert majority(group) == calc_maj_val(theirs, "pred", "val")


def test_intervals_are_those_of_an_evaluation() -> None:
    rewards = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    metrics = of(("a", i, reward) for i, reward in enumerate(rewards))
    estimate = interval(rewards)
    assert (metrics["val/accuracy_low"], metrics["val/accuracy_high"]) == (
        estimate.low,
        estimate.high,
    )
    two = of(
        [("a", i, reward) for i, reward in enumerate(rewards)] + [("b", 0, 1.0), ("b", 1, 0.0)]
    )
    both = average({"a": rewards, "b": [1.0, 0.0]})
    assert (two["val/accuracy_low"], two["val/accuracy_high"]) == (both.low, both.high)
    # Variances of the means: 4/15 among six prompts, and 1/2 among two.
    half = NormalDist().inv_cdf(0.975) * (4 / 15 / 6 + 1 / 2 / 2) ** 0.5 / 2
    ends = (two["val/accuracy_low"], two["val/accuracy_high"])
    assert ends == pytest.approx((7 / 12 - half, 7 / 12 + half))


@pytest.mark.parametrize(
    ("functions", "text", "more", "vote"),
    [
        (["arithmetic"], "1 + 2 = 03", None, "3"),
        (["arithmetic"], "none", None, None),
        (["math_verify"], r"so \boxed{ 3\%. } or 4", None, "3%"),
        (["math_verify"], "it is 1,000", None, "1000"),
        (["own.py:f"], "3", None, None),
        (["own.py:f"], "3", {"pred": 7}, "7"),
        (["own.py:f", "arithmetic"], "3", {"pred": None}, "3"),
    ],
)
def test_votes(functions: list[str], text: str, more: Any, vote: str | None) -> None:
    assert vote_of(functions, text, Scored(1.0, more)) == vote


def test_the_best_of_two_is_not_that_of_four():
    """Of two prompts with two answers one has a right one, and so have both with four."""
    answers = [("amc", 0, 1.0), ("amc", 0, 0.0), ("amc", 1, 0.0), ("amc", 1, 0.0)]
    answers += [("amc", prompt, float(place == 3)) for prompt in (2, 3) for place in range(4)]
    metrics = of(answers)
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


def test_a_run_on_stale_responses_has_both_parts_of_the_mismatch() -> None:
    """By hand: the first step compared nothing, as after a resume."""
    first = {"mismatch/abs_mean": 0.5, "staleness/age_mean": 0.0, "staleness/age_max": 0.0}
    checked = {"mismatch/of_version_abs_mean": 0.0, "mismatch/of_version_abs_max": 0.0}
    stale = {"staleness/age_mean": 1.0, "staleness/age_max": 2.0, "staleness/ratio_abs_mean": 0.25}
    rows = [first, {"mismatch/abs_mean": 0.25} | checked | stale]
    fracs = [{"staleness/checked_frac": frac} for frac in (0.0, 1.0)]
    summary = summarize([row | frac | STEP for row, frac in zip(rows, fracs, strict=True)])
    assert summary["mismatch_abs_mean"] == 0.375
    assert {key: value for key, value in summary.items() if "version" in key or "stal" in key} == {
        "mismatch_of_version_abs_mean": 0.0,
        "mismatch_of_version_abs_max": 0.0,
        "staleness_age_mean": 0.5,
        "staleness_age_max": 2.0,
        "staleness_ratio_abs_mean": 0.25,
        "staleness_checked_frac_mean": 0.5,
    }
    assert not any("stal" in key or "version" in key for key in summarize([{"step": 1} | STEP]))


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
