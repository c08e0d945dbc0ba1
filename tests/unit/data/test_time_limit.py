"""The time limit on rewards: what it ends, in the main thread and in others, and what it leaves alone."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from qarl.data.prompts import Prompt
from qarl.data.rewards import OutOfTimeError, call_within, math_verify, score_responses
from qarl.errors import UserError

PROMPT = Prompt(7, "sums", [{"role": "user", "content": "?"}], [1], "42")


def loop(**_: Any) -> float:
    while True:
        pass


def loop_that_catches(**_: Any) -> float:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def sleep(**_: Any) -> float:
    time.sleep(500)
    return 0.0


def regular_expression(**_: Any) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def takes_the_alarm(**_: Any) -> float:
    signal.alarm(0)
    time.sleep(0.4)
    return 1.0


IN_THE_MAIN_THREAD = (loop, loop_that_catches, sleep, regular_expression, takes_the_alarm)
IN_OTHER_THREADS = (loop, loop_that_catches, sleep)


def in_a_thread(work: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return outcome[0]


@pytest.mark.parametrize("reward", IN_THE_MAIN_THREAD)
def test_a_reward_that_does_not_end_is_an_error(reward: Callable[..., float]) -> None:
    started = time.monotonic()
    before, handler = signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)  # pytest's own limit
    with pytest.raises(UserError) as error:
        score_responses(reward, [PROMPT], ["x" * 1000], timeout_s=0.2)
    left, took = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic() - started
    assert took < 60  # without a limit: 500 s, or for ever
    assert 0 <= before - left <= took + 0.1
    for part in (reward.__name__, "reward.timeout_s=0.2", "row 7", "'sums'"):
        assert part in str(error.value)
    assert signal.getsignal(signal.SIGALRM) == handler


@pytest.mark.parametrize("reward", IN_OTHER_THREADS)
def test_in_another_thread_too(reward: Callable[..., float]) -> None:
    started, threads = time.monotonic(), set(threading.enumerate())
    error = in_a_thread(lambda: score_responses(reward, [PROMPT], ["x"], timeout_s=0.2))
    assert isinstance(error, UserError) and "reward.timeout_s=0.2" in str(error)
    assert time.monotonic() - started < 60
    left = set(threading.enumerate()) - threads
    if reward is not sleep:  # what loops in Python ends; what waits in C is left behind
        for thread in left:
            thread.join(60)
        assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("place", [lambda work: work(), in_a_thread], ids=["main", "thread"])
def test_what_ends_in_time_is_left_alone(place: Callable[[Callable[[], Any]], Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        raise place(lambda: call_within(60, lambda: 1 // 0))
    assert place(lambda: call_within(None, lambda: 3)) == 3
    assert place(lambda: score_responses(lambda **_: 0.5, [PROMPT] * 3, ["x"] * 3, timeout_s=60)) == [0.5] * 3


@pytest.mark.long
def test_math_verifys_own_alarms_do_not_end_ours() -> None:
    """Each of its comparisons sets and clears the alarm."""

    def many(**_: Any) -> float:
        while True:
            math_verify("math", "\\boxed{3}", "3")

    math_verify("math", "\\boxed{3}", "3")  # imports: the limit must not end one
    with pytest.raises(OutOfTimeError):
        call_within(1.0, many)
