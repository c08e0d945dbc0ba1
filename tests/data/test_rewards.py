"""The built-in rewards on real answers, users' functions by name, and what a broken one leads to."""

import copy
import math
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qarl.data import Prompt
from qarl.data.rewards import arithmetic, check_reward_fn, get_reward_fn, math_verify, score_responses
from qarl.errors import UserError


def prompt(index: int = 0, ground_truth: Any = "42") -> Prompt:
    return Prompt(index, "sums", [{"role": "user", "content": "?"}], [1], ground_truth, {"split": "train"})


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("0+4+0=04 =55604", "55604", 1.0),
        ("0+4+0=04 =55604", "4", 0.0),
        ("the answer is 42.", "42", 1.0),
        ("42 or 43", "42", 0.0),
        ("=042", "42", 1.0),
        ("=000", "0", 1.0),
        ("= -42", "-42", 1.0),
        ("=-42", "42", 0.0),
        ("84-42", "42", 1.0),
        ("(84)-42", "42", 1.0),
        ("41.42", "42", 0.0),
        ("142", "42", 0.0),
        ("42", 42, 1.0),
        ("42", " 042 ", 1.0),
        ("\u0664\u0662", "42", 0.0),
        ("", "42", 0.0),
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
    ("", "4", 0.0),
    ("\\boxed{", "4", 0.0),
]


@pytest.mark.parametrize(("response", "ground_truth", "score"), MATH_CASES)
def test_math_verify(response: str, ground_truth: str, score: float) -> None:
    assert math_verify("math", response, ground_truth) == score


def test_math_verify_from_another_thread() -> None:
    """math-verify's time limit is a signal, which Python refuses outside the main thread."""
    scores: list[float] = []

    def work() -> None:
        scores.extend(math_verify("math", response, ground_truth) for response, ground_truth, _ in MATH_CASES)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert scores == [score for _, _, score in MATH_CASES]


def test_math_verify_leaves_the_callers_alarm() -> None:
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        previous = signal.setitimer(signal.ITIMER_REAL, 500.0)
        math_verify("math", "\\boxed{3}", "3")
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous)
        signal.signal(signal.SIGALRM, handler)


def test_math_verify_gives_up_on_a_monster() -> None:
    """The comparison of math-verify runs into its time limit or answers; either way no exception gets out."""
    assert math_verify("math", "\\boxed{9^{9^{9^{9}}}}", "1") == 0.0


USER_FILE = """
LIMIT = 1

def by_length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 10

def with_defaults(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 0.5, "why": extra_info["split"]}

def two_arguments(solution_str, ground_truth):
    return 1.0

def other_names(source, solution, truth, info):
    return 1.0

def by_position(data_source, solution_str, ground_truth, extra_info, /):
    return 1.0
"""


def test_functions_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(USER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    for source in ("my_rewards", str(tmp_path / "my_rewards.py")):
        assert score_responses(get_reward_fn(f"{source}:by_length"), [prompt()] * 2, ["", "abc"]) == [0.0, 0.3]
        assert score_responses(get_reward_fn(f"{source}:with_defaults"), [prompt()], ["abc"]) == [0.5]
    assert get_reward_fn("arithmetic") is arithmetic
    assert get_reward_fn("math_verify") is math_verify


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("arithmetics", ["'arithmetics'", "did you mean 'arithmetic'"]),
        ("nothing_alike", ["arithmetic, math_verify"]),
        (":f", ["unknown reward function"]),
        ("no_such_module:f", ["no_such_module", "ModuleNotFoundError"]),
        ("FOLDER/none.py:f", ["no such file"]),
        ("FOLDER/broken.py:f", ["cannot load", "ZeroDivisionError"]),
        ("FOLDER/good.py:by_lenght", ["no 'by_lenght'", "did you mean 'by_length'"]),
        ("FOLDER/good.py:LIMIT", ["not callable", "int"]),
        ("FOLDER/good.py:two_arguments", ["wrong signature", "data_source", "def two_arguments("]),
        ("FOLDER/good.py:other_names", ["wrong signature (source, solution, truth, info)", "def other_names("]),
        ("FOLDER/good.py:by_position", ["wrong signature", "keyword arguments"]),
    ],
)
def test_bad_names(tmp_path: Path, spec: str, parts: list[str]) -> None:
    (tmp_path / "good.py").write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError) as error:
        get_reward_fn(spec.replace("FOLDER", str(tmp_path)))
    for part in ["reward.function", *parts]:
        assert part in str(error.value)


def test_a_reward_that_raises_names_the_row() -> None:
    def picky(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        return 1.0 / len(solution_str)

    with pytest.raises(UserError) as error:
        score_responses(picky, [prompt(0), prompt(7)], ["x", ""])
    for part in ("picky", "ZeroDivisionError", "row 7", "'sums'"):
        assert part in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def grows_a_list(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    extra_info["seen"].append(solution_str)
    return 1.0


def sets_a_key(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    extra_info["answer"] = solution_str
    return 1.0


def sorts_the_truth(data_source: str, solution_str: str, ground_truth: list, extra_info: dict) -> float:
    ground_truth.sort()
    return 1.0


def writes_into_an_array(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    extra_info["array"][0] = 5
    return 1.0


def reads_and_copies(data_source: str, solution_str: str, ground_truth: list, extra_info: dict) -> float:
    mine = copy.deepcopy(extra_info)
    mine["seen"].append(solution_str)
    return float(sorted(ground_truth)[0] + mine["array"].sum() + len(f"{extra_info}") * 0)


@pytest.mark.parametrize(
    ("fn", "argument"),
    [
        (grows_a_list, "extra_info"),
        (sets_a_key, "extra_info"),
        (sorts_the_truth, "ground_truth"),
        (writes_into_an_array, "extra_info"),
    ],
)
def test_a_reward_that_changes_its_arguments(fn: Any, argument: str) -> None:
    """Responses to one prompt share them, so the second would be scored differently."""
    truth: Any = [3, 1, 2]
    extra = {"seen": [], "array": np.zeros(3), "text": "a", "nested": {"k": [1]}}
    asked = Prompt(7, "sums", [], [], truth, extra)
    assert score_responses(reads_and_copies, [asked] * 2, ["x", "y"]) == [1.0, 1.0]
    with pytest.raises(UserError, match=rf"{fn.__name__} changed its argument {argument}[\s\S]*row 7[\s\S]*deepcopy"):
        score_responses(fn, [asked] * 2, ["x", "y"])


def test_arguments_that_cannot_be_compared_are_let_through() -> None:
    asked = Prompt(7, "sums", [], [], "1", {"call": lambda: 1})
    assert score_responses(lambda **_: 0.5, [asked], ["x"]) == [0.5]


class BrokenError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise OSError(name)

    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), GeneratorExit(), BaseException()])
def test_whatever_a_reward_raises_names_it_and_the_row(tmp_path: Path, error: BaseException) -> None:
    def ends(**_: Any) -> float:
        raise error

    with pytest.raises(UserError, match=rf"ends raised {type(error).__name__}[\s\S]*row 7"):
        score_responses(ends, [prompt(7)], ["x"])


def test_an_exception_without_text() -> None:
    def fails(**_: Any) -> float:
        raise BrokenError

    with pytest.raises(UserError, match="fails raised BrokenError"):
        score_responses(fails, [prompt()], ["x"])


def test_ctrl_c_is_no_fault_of_the_reward() -> None:
    def interrupted(**_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_responses(interrupted, [prompt()], ["x"])


@pytest.mark.parametrize("spec", ["ends:f", "FOLDER/ends.py:f"])
def test_a_reward_file_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="SystemExit"):
        get_reward_fn(spec.replace("FOLDER", str(tmp_path)))


RESULTS = {
    "a long integer": lambda: 10**400,
    "an object that fails": Broken,
    "a dict with one": lambda: {"score": Broken()},
    "a dict with a long integer": lambda: {"score": 10**400},
    "an empty dict": dict,
    "another dict": lambda: {1: 2},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_that_break_the_check(kind: str) -> None:
    result = RESULTS[kind]()
    with pytest.raises(UserError, match=r"returned[\s\S]*row 3"):
        score_responses(lambda **_: result, [prompt(3)], ["x"])


@pytest.mark.parametrize(
    "result", [math.nan, math.inf, None, "1.0", {"reward": 1.0}, {"score": math.nan}, 1j, torch.zeros(2), [1.0]]
)
def test_a_result_that_is_no_finite_number(result: Any) -> None:
    with pytest.raises(UserError, match=r"returned[\s\S]*row 3"):
        score_responses(lambda **_: result, [prompt(3)], ["x"])


@pytest.mark.parametrize("result", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_any_kind(result: Any) -> None:
    scores = score_responses(lambda **_: result, [prompt()], ["x"])
    assert scores == [1.0] and type(scores[0]) is float


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="zip"):
        score_responses(arithmetic, [prompt()], ["1", "2"])


def test_check_reward_fn_calls_once_with_an_empty_response() -> None:
    calls: list[dict[str, Any]] = []

    def spy(**arguments: Any) -> float:
        calls.append(arguments)
        return 0.0

    check_reward_fn(spy, [prompt(0), prompt(1)])
    assert calls == [
        {"data_source": "sums", "solution_str": "", "ground_truth": "42", "extra_info": {"split": "train"}}
    ]
    with pytest.raises(UserError, match="IndexError"):
        check_reward_fn(lambda **arguments: arguments["solution_str"][0], [prompt()])
