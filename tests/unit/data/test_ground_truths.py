"""Ground truths that no response can match are found before a run, and those of honest tasks are not."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from qarl.data import ground_truths
from qarl.data.ground_truths import FORMS, ROWS, judge, refusal
from qarl.data.prompts import Prompt
from qarl.data.reward_workers import InProcessReward
from qarl.data.rewards import BUILTIN
from qarl.demo.tasks import last_word
from qarl.errors import UserError


def tagged(solution_str: str, ground_truth: Any, **_: Any) -> float:
    """As many users write it: 1 for the answer in tags, and -1 for anything else."""
    return 1.0 if f"<answer>{ground_truth}</answer>" in solution_str else -1.0


def shorter(solution_str: str, **_: Any) -> float:
    return -float(len(solution_str))


def within_markers(solution_str: str, ground_truth: Any, **_: Any) -> float:
    return float(f"<<{ground_truth}>>" in solution_str)


def passes_tests(solution_str: str, ground_truth: Any, **_: Any) -> float:
    return float(solution_str in ground_truth["tests"])


REWARDS = {**BUILTIN, "last_word": last_word} | {
    function.__name__: function for function in (tagged, shorter, within_markers, passes_tests)
}
CASES = (  # reward, ground truths, how many are no right answers
    (
        "arithmetic",
        ["72", "1,000", 5, 7.0, "so 8*9 = 72\n#### 72", "\\boxed{5}", "$1,000", "-3"],
        0,
    ),
    ("arithmetic", ["72 apples", "A", "1/2", "x=5", "5-3", "2024-01-01", "", "True"], 8),
    (
        "math_verify",
        [
            "72",
            "1,000",
            "A",
            "(A)",
            "\\frac{1}{2}",
            "[1,2]",
            "so\n#### 72",
            "x=5",
            "72%",
            "\\text{B}",
        ],
        0,
    ),
    ("math_verify", ["", "  ", "72"], 2),
    ("last_word", ["abc", "sorted"], 0),
    ("last_word", ["two words", "words"], 1),
    ("tagged", ["72", "one two"], 0),
    ("shorter", ["72"], 1),
    ("within_markers", ["72"], 1),
    ("passes_tests", [{"tests": ["x"]}, {"tests": ["y"]}], 0),
    ("passes_tests", [["x"]], 0),
)


def prompts(truths: list[Any]) -> list[Prompt]:
    return [
        Prompt(i, "test", [{"role": "user", "content": "?"}], [1], truth)
        for i, truth in enumerate(truths)
    ]


@pytest.mark.parametrize(("name", "truths", "wrong"), CASES, ids=lambda value: str(value)[:30])
def test_ground_truths_as_answers(name: str, truths: list[Any], wrong: int) -> None:
    judged = judge(InProcessReward(name, REWARDS[name]), prompts(truths), timeout_s=None)
    texts = [truth for truth in truths if isinstance(truth, str | int | float)]
    assert (judged.count, len(judged.wrong)) == (len(texts), wrong)


@pytest.mark.parametrize(("wrong", "refused"), [(0, False), (4, False), (5, True), (8, True)])
def test_fewer_than_half(wrong: int, refused: bool) -> None:
    truths = ["no number"] * wrong + ["72"] * (8 - wrong)
    judged = judge(
        InProcessReward("arithmetic", BUILTIN["arithmetic"]), prompts(truths), timeout_s=None
    )
    error = refusal(judged, "arithmetic", "data.train_files")
    assert (error is not None) == refused
    if error is not None:
        text = str(error)
        assert (
            f"{wrong} of 8 ground truths are no right answers for the reward function arithmetic"
            in text
            and text.count("'no number'") == 3
            and "row 2" in text
        )
        assert "data.train_files" in text and "reward.check_ground_truths=false" in text


def test_only_the_first_rows_and_few_calls() -> None:
    asked: list[str] = []

    def asking(solution_str: str, **_: Any) -> float:
        asked.append(solution_str)
        return float(solution_str.startswith("Answer: "))

    judged = judge(
        InProcessReward("asking", asking), prompts([str(i) for i in range(200)]), timeout_s=None
    )
    assert (judged.count, judged.wrong) == (ROWS, [])
    assert len(asked) == 2 * ROWS + 8 * (len(FORMS) - 1), (
        "the form that was right is tried first from then on"
    )


@pytest.mark.parametrize(("seconds", "count"), [(0, 0), (40, 0), (60, 8), (120, 16)])
def test_a_slow_function_is_asked_for_a_part(
    monkeypatch: pytest.MonkeyPatch, seconds: int, count: int
) -> None:
    """It takes a second per response, 56 for 8 rows in all forms. Rows that were not given in all are not judged."""
    calls: list[str] = []

    def slow(solution_str: str, **_: Any) -> float:
        calls.append(solution_str)
        return 0.0

    monkeypatch.setattr(ground_truths, "time", SimpleNamespace(monotonic=lambda: len(calls)))
    judged = judge(
        InProcessReward("slow", slow), prompts(["72"] * 64), timeout_s=None, seconds=seconds
    )
    assert (judged.count, len(judged.wrong)) == (count, count)
    assert judged.mostly_wrong == bool(count) and len(calls) <= seconds + 8


def test_a_function_that_fails_for_a_right_answer() -> None:
    """Otherwise the run would end at the first right response."""

    def fails(solution_str: str, ground_truth: str, **_: Any) -> float:
        return 1.0 / json.loads(ground_truth) if solution_str == ground_truth else 0.0

    with pytest.raises(UserError, match="ZeroDivisionError") as error:
        judge(InProcessReward("fails", fails), prompts(["1", "0"]), timeout_s=None)
    assert "row 1" in str(error.value)


def test_nothing_to_judge() -> None:
    judged = judge(InProcessReward("tagged", tagged), prompts([{"a": 1}] * 3), timeout_s=None)
    assert judged.count == 0 and refusal(judged, "tagged", "x") is None
