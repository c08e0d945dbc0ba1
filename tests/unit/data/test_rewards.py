"""The built-in rewards on real answers, users' functions by name, and what a broken one leads to."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qarl.data.prompts import Prompt
from qarl.data.reward_workers import InProcessReward
from qarl.data.rewards import arithmetic, get_reward_fn, math_verify
from qarl.data.scoring import find_reward, score_responses
from qarl.errors import UserError


def prompt(index: int = 0, ground_truth: Any = "42") -> Prompt:
    return Prompt(
        index, "sums", [{"role": "user", "content": "?"}], [1], ground_truth, {"split": "train"}
    )


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("0+4+0=04 =55604", "55604", 1.0),
        ("the answer is 42.", "42", 1.0),
        ("=042", "42", 1.0),
        ("=-42", "42", 0.0),
        ("84-42", "42", 1.0),
        ("41.42", "42", 0.0),
        ("42", 42, 1.0),
        ("42", " 042 ", 1.0),
        ("\u0664\u0662", "42", 0.0),
        ("no number", "42", 0.0),
        ("7" * 10_000, "42", 0.0),
    ],
)
def test_arithmetic_scores_the_last_number(response: str, ground_truth: Any, score: float) -> None:
    assert arithmetic("sums", response, ground_truth) == score


MATH_CASES = [
    ("The answer is $\\boxed{\\frac{1}{2}}$.", "0.5", 1.0),
    ("so x = \\boxed{2\\sqrt{3}}", "\\sqrt{12}", 1.0),
    ("\\boxed{3}", "\\frac{6}{2}", 1.0),
    ("\\boxed{3}", "4", 0.0),
    ("I do not know", "4", 0.0),
    ("\\boxed{", "4", 0.0),
]


@pytest.mark.parametrize(("response", "ground_truth", "score"), MATH_CASES)
def test_math_verify(response: str, ground_truth: str, score: float) -> None:
    assert math_verify("math", response, ground_truth) == score


@pytest.mark.long
def test_math_verify_from_another_thread() -> None:
    """math-verify's time limit is a signal, which Python refuses outside the main thread; a worker has its own."""
    reward = find_reward("math_verify", workers=1)

    def work() -> list[float]:
        rows = [
            prompt(index, ground_truth) for index, (_, ground_truth, _) in enumerate(MATH_CASES)
        ]
        return score_responses(
            reward, rows, [response for response, _, _ in MATH_CASES], timeout_s=60
        )

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result() == [score for _, _, score in MATH_CASES]


USER_FILE = """
LIMIT = 1

def by_length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 10

def with_defaults(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 0.5, "why": extra_info["split"]}

def two_arguments(solution_str, ground_truth):
    return 1.0
"""


def test_functions_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(USER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    for source in ("my_rewards", str(tmp_path / "my_rewards.py")):
        assert score_responses(find_reward(f"{source}:by_length"), [prompt()] * 2, ["", "abc"]) == [
            0.0,
            0.3,
        ]
        assert score_responses(find_reward(f"{source}:with_defaults"), [prompt()], ["abc"]) == [0.5]
    assert get_reward_fn("arithmetic") is arithmetic
    assert get_reward_fn("math_verify") is math_verify


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing_alike", "arithmetic, environment, math_verify"),
        ("no_such_module:f", r"cannot load no_such_module[\s\S]*ModuleNotFoundError"),
        ("FOLDER/none.py:f", "No such file"),
        ("FOLDER/broken.py:f", r"cannot load[\s\S]*ZeroDivisionError"),
        ("FOLDER/good.py:by_lenght", r"no function 'by_lenght'[\s\S]*by_length, with_defaults"),
        ("FOLDER/good.py:LIMIT", "no function 'LIMIT'"),
    ],
)
def test_bad_names(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "good.py").write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=message) as here:
        get_reward_fn(spec.replace("FOLDER", str(tmp_path)))
    with pytest.raises(UserError) as in_a_worker:
        find_reward(spec.replace("FOLDER", str(tmp_path))).load()
    assert str(in_a_worker.value) == str(here.value)


def here(function: Callable[..., Any]) -> InProcessReward:
    return InProcessReward(function.__name__, function)


@pytest.mark.parametrize(
    "result",
    [
        math.nan,
        None,
        "1.0",
        b"1",
        {"reward": 1.0},
        {"score": math.inf},
        10**400,
        1e39,
        torch.zeros(2),
        [1.0],
    ],
    ids=str,
)
def test_a_result_that_is_no_finite_number(result: Any) -> None:
    with pytest.raises(UserError, match=r"returned[\s\S]*row 3"):
        score_responses(here(lambda **_: result), [prompt(3)], ["x"])


@pytest.mark.parametrize("result", [1, True, np.float32(1), torch.tensor(1.0)])
def test_numbers_of_any_kind(result: Any) -> None:
    scores = score_responses(here(lambda **_: result), [prompt()], ["x"])
    assert scores == [1.0] and type(scores[0]) is float
