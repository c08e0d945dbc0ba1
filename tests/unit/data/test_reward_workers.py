"""A reward function in its worker processes: limits of time, ends of processes, and what stays out of the trainer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from qarl.data.prompts import Prompt
from qarl.data.reward_workers import WorkerReward
from qarl.data.scoring import find_reward, score_responses
from qarl.errors import UserError

FUNCTIONS = """
import os, re, signal, sys, time

CALLS = []

def loops(**_):
    while True:
        try:
            while True:
                pass
        except:
            pass

def resets_the_alarm(**_):
    signal.alarm(0)
    while True:
        pass

def slow_regular_expression(**_):
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))

def leaves(**_):
    os._exit(0)

def crashes(**_):
    os.kill(os.getpid(), signal.SIGSEGV)

def slow_for_some(solution_str, **_):
    time.sleep(float(solution_str))
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def rows(count: int) -> list[Prompt]:
    return [Prompt(7 + index, "sums", [], [1], "42") for index in range(count)]


@pytest.mark.parametrize("name", ["loops", "resets_the_alarm", "slow_regular_expression"])
def test_what_does_not_end_is_ended(file: Path, name: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        score_responses(find_reward(f"{file}:{name}", workers=1), rows(1), ["x"], timeout_s=0.2)
    assert time.monotonic() - started < 60
    for part in (name, "reward.timeout_s=0.2", "row 7", "'sums'"):
        assert part in str(error.value)


@pytest.mark.parametrize(("name", "words"), [("leaves", "exit code 0"), ("crashes", "SIGSEGV")])
def test_the_end_of_a_process_is_named(file: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"{name} ended its process[\s\S]*row 7[\s\S]*{words}"):
        score_responses(find_reward(f"{file}:{name}", workers=1), rows(1), ["x"], timeout_s=None)


def test_time_in_the_queue_does_not_count(file: Path) -> None:
    reward = find_reward(f"{file}:slow_for_some", workers=1)
    assert score_responses(reward, rows(4), ["0.5"] * 4, timeout_s=1.5) == [1.0] * 4


@pytest.mark.parametrize("how", ["untouched", "edited", "deleted"])
def test_a_worker_that_starts_later_has_the_same_function(tmp_path: Path, how: str) -> None:
    """A worker that has died between two calls, as for lack of memory, is replaced."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    reward = find_reward(f"{file}:slow_for_some", 1)
    assert isinstance(reward, WorkerReward)
    assert score_responses(reward, rows(1), ["0"], timeout_s=5) == [1.0]
    os.killpg(reward._idle[0]._process.pid, signal.SIGKILL)
    if how == "untouched":
        assert score_responses(reward, rows(1), ["0"], timeout_s=5) == [1.0]
    elif how == "edited":
        file.write_text(FUNCTIONS.replace("1.0", "0.0"))
        with pytest.raises(UserError, match="was changed during the run"):
            score_responses(reward, rows(1), ["0"], timeout_s=5)
        assert score_responses(reward, rows(1), ["0"], timeout_s=5) == [0.0]  # all begin again
    else:
        file.unlink()
        with pytest.raises(UserError, match=r"functions\.py"):
            score_responses(reward, rows(1), ["0"], timeout_s=5)
    reward.stop()
