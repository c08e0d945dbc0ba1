"""`reward.function=reasoning_gym` with a stand-in for the library: where the answer is found, and what is refused."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qarl import side_packages
from qarl.config import load_config
from qarl.data import reasoning_gym_reward
from qarl.data.entry_text import to_text
from qarl.data.ground_truths import judge
from qarl.data.prompts import Prompt
from qarl.data.reasoning_gym_tasks import make_dataset
from qarl.data.rewards import get_reward_fn
from qarl.data.scoring import find_reward, score_responses
from qarl.errors import UserError

ENTRY = {"question": "What is 1 + 2?", "answer": "3", "metadata": {"pair": (1, 2)}}


def prompt(answer_in: str = "auto", truth: Any = "3", **parameters: str) -> Prompt:
    info = {
        "task": "sums",
        "parameters": json.dumps(parameters),
        "entry": to_text(ENTRY),
        "answer_in": answer_in,
    }
    return Prompt(0, "reasoning_gym/sums", [], [], truth, info)


def scores(prompts: list[Prompt], responses: list[str]) -> list[float]:
    reward = find_reward("reasoning_gym", 1)
    try:
        return score_responses(reward, prompts, responses, timeout_s=60)
    finally:
        reward.stop()


CASES = [
    ("auto", "3", 1),
    ("auto", " 3\n", 1),
    ("auto", "so <answer>3</answer>", 1),
    ("auto", "<answer>4</answer> 3", 0),
    ("auto", "<answer>4</answer><answer>3</answer>", 1),
    ("auto", "1 + 2 = 3", 0),
    ("auto", "", 0),
    ("tags", "3", 0),
    ("tags", "<answer> 3 </answer>", 1),
    ("last_line", "I add\n\n 3 \n\n", 1),
    ("last_line", "3\nor 4", 0),
    ("last_line", "", 0),
    ("last_number", "1 + 2 = 3", 1),
    ("last_number", "That is **3.0**.", 1),
    ("last_number", "3, or 1,003", 0),
    ("last_number", "three", 0),
    ("whole", "\n3 ", 1),
    ("whole", "<answer>3</answer>", 0),
    ("whole", "boom", 0),
]


@pytest.mark.usefixtures("fake_gym")
def test_the_answer_is_found_as_the_row_says() -> None:
    prompts = [prompt(answer_in) for answer_in, _, _ in CASES]
    found = scores(prompts, [response for _, response, _ in CASES])
    assert found == [float(score) for _, _, score in CASES]


@pytest.mark.usefixtures("fake_gym")
def test_the_scorer_has_the_parameters_of_its_task() -> None:
    assert scores([prompt(scale="0.25"), prompt()], ["3", "3"]) == [0.25, 1.0]


@pytest.mark.usefixtures("fake_gym")
def test_ground_truths_verify_against_themselves() -> None:
    reward = find_reward("reasoning_gym", 1)
    try:
        assert judge(reward, [prompt()] * 4, timeout_s=60).wrong == []
        assert len(judge(reward, [prompt(truth="4")] * 4, timeout_s=60).wrong) == 4
        assert judge(reward, [prompt(truth={"answer": ""})] * 4, timeout_s=60).count == 0
    finally:
        reward.stop()


@pytest.mark.usefixtures("fake_gym")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", ["forever", "tolerant", "stubborn", "deaf"])
def test_an_answer_that_keeps_the_scorer_busy_scores_0(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """As 9**9**9**9 does in the task countdown, and also where the scorer catches all exceptions. The limit does not
    outlive the call."""
    monkeypatch.setattr(reasoning_gym_reward, "CPU_SECONDS", 0.2)
    handler = signal.getsignal(signal.SIGVTALRM)
    tracer = sys.gettrace()
    dataset = make_dataset("sums", {})
    started = time.process_time()
    assert reasoning_gym_reward.score_of(dataset, answer, ENTRY) == 0.0
    assert sys.gettrace() is tracer
    assert 0.1 < time.process_time() - started < 5
    assert reasoning_gym_reward.score_of(dataset, "3", ENTRY) == 1.0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == handler


@pytest.mark.usefixtures("fake_gym")
def test_a_row_of_other_data_is_refused() -> None:
    other = Prompt(0, "gsm8k", [], [], "3", {"split": "train"})
    with pytest.raises(UserError, match="a row has no task for reasoning-gym's scorer") as found:
        scores([other], ["3"])
    assert "reward.function=" not in str(found.value), (
        "reward.functions may name it, or a key of TRL"
    )


def test_without_the_library_the_error_says_how_to_install_it(
    fake_gym: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if "fake_gym" not in folder])
    monkeypatch.setattr(side_packages, "folder", lambda: tmp_path)
    with pytest.raises(
        UserError, match=r"reward\.function=reasoning_gym needs reasoning_gym"
    ) as found:
        get_reward_fn("reasoning_gym")
    assert "make smollm2" in str(found.value)


def test_the_config_takes_the_name() -> None:
    config = load_config(["config=quickstart.yaml", "reward.function=reasoning_gym"])
    assert config.reward.function == "reasoning_gym"
