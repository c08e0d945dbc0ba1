"""Call, find and check reward functions, both built-in ones and the user's.

A reward function has the signature of verl's custom rewards, so one function works with both backends:

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float

It may also return a dict with the number under "score". As in verl, the arguments are passed by keyword.

The config names the function as `arithmetic`, `math_verify`, `package.module:function` or `path/to/file.py:function`.

If the function raises, calls `sys.exit`, does not return a finite number or takes longer than `reward.timeout_s`, the
run stops with an error that names the row. If an exception scored 0 instead, the model would learn to avoid the bug. If
a timeout scored 0, the rewards would depend on how busy the machine is.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import importlib.util
import inspect
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from qarl.data.prompts import Prompt, shortened
from qarl.errors import UserError

RewardFn = Callable[..., Any]
Result = TypeVar("Result")

# A minus belongs to a number only if it cannot be a subtraction: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\d+(?:\.\d+)?", flags=re.ASCII)


def arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number of the response is the integer `ground_truth`, else 0.0.

    Leading zeros are ignored. A number with decimals is not an integer. Thousands separators are not recognized.
    """
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and _canonical(numbers[-1]) == _canonical(str(ground_truth).strip()))


def _canonical(number: str) -> str:
    """Return `number` as text without leading zeros.

    `int` would refuse the thousands of digits that a model can write.
    """
    magnitude = number.removeprefix("-").lstrip("0") or "0"
    return f"-{magnitude}" if number.startswith("-") and magnitude != "0" else magnitude


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if an answer in the response (LaTeX, boxed or plain) equals `ground_truth` mathematically, else 0.0.

    Uses the math-verify package with the settings of verl's `math_verify` reward. The package's time limit (5 seconds
    to parse, 5 to compare) uses an alarm signal, which works only in the main thread. So calls from other threads run
    in a separate process, as in verl.
    """
    if threading.current_thread() is threading.main_thread():
        return math_verify_within(5, solution_str, str(ground_truth))
    return _process_pool().submit(math_verify_within, 5, solution_str, str(ground_truth)).result()


def math_verify_within(seconds: int, solution_str: str, ground_truth: str) -> float:
    """Do the same as `math_verify` with a time limit of `seconds`, in the main thread."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def is_equal(gold: Any, answer: Any) -> bool:
        with preserved_alarm():
            return bool(verify(gold, answer, timeout_seconds=seconds))

    with preserved_alarm():
        golds = parse(f"\\boxed{{{ground_truth}}}", (LatexExtractionConfig(),), parsing_timeout=seconds)
    with preserved_alarm():
        answers = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=seconds)
    return float(any(is_equal(gold, answer) for gold in golds for answer in answers))


@cache
def _process_pool() -> ProcessPoolExecutor:
    # "spawn", because it is not safe to fork a process with CUDA or several threads.
    return ProcessPoolExecutor(max_workers=min(4, os.cpu_count() or 1), mp_context=get_context("spawn"))


BUILTIN: dict[str, RewardFn] = {"arithmetic": arithmetic, "math_verify": math_verify}


def get_reward_fn(spec: str) -> RewardFn:
    """Return the reward function that `spec` names.

    Raise UserError if there is no such built-in name, module, file or function.
    """
    if spec in BUILTIN:
        return BUILTIN[spec]
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UserError(
            f"unknown reward function {spec!r}",
            where="reward.function",
            fix=f"use one of {', '.join(BUILTIN)}, package.module:function or path/to/file.py:function",
        )
    module = load_module(source)
    fn: RewardFn | None = getattr(module, name, None)
    if not callable(fn):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise UserError(
            f"{source} has no function {name!r}",
            where=f"reward.function={spec}",
            why=f"its functions: {', '.join(functions) or 'none'}",
            fix=f"write reward.function={source}:NAME with the name of a function",
        )
    return fn


def load_module(source: str, where: str = "reward.function") -> ModuleType:
    """Import a module by its name or by the path of its file. Raise UserError, at `where`, if that fails."""
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        spec = importlib.util.spec_from_file_location(f"qarl_reward_{Path(source).stem}", source)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # the user's code runs and may raise anything
        raise UserError(
            f"cannot load {source}",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="correct the file, or its path from the folder that the run starts in; or install the package",
        ) from error


def score_responses(
    fn: RewardFn, prompts: Sequence[Prompt], responses: Sequence[str], *, timeout_s: float | None = None
) -> list[float]:
    """Return the score of each `responses[i]`, an answer to `prompts[i]`.

    `timeout_s`: time limit per response, in seconds; None means no limit.

    Raises:
        UserError: `fn` raised (its exception is chained), took longer than `timeout_s`, or did not return a finite
            number (alone or under "score").
    """
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        where = f"row {prompt.index}, "
        arguments: dict[str, Any] = {"data_source": prompt.data_source, "solution_str": response}
        arguments |= {"ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
        result = call_reward(fn, arguments, timeout_s=timeout_s, where=where)
        scores.append(score_of(fn, result, arguments, where=where))
    return scores


def call_reward(fn: RewardFn, arguments: dict[str, Any], *, timeout_s: float | None, where: str = "") -> Any:
    """Return the result of `fn` for the four `arguments`. Raise UserError if `fn` raises or exceeds `timeout_s`.

    `where`: text to show in the error before the data source. `fn` gets copies of `ground_truth` and `extra_info`,
    because all responses to a prompt share them: a change would affect the score of the next response.
    """
    name, place = _name(fn), f"{where}data_source {arguments['data_source']!r}"
    response = shortened(arguments["solution_str"])
    shared = {key: value for key, value in arguments.items() if key in ("ground_truth", "extra_info")}
    try:
        return call_within(timeout_s, lambda: fn(**arguments | copy.deepcopy(shared)))
    except OutOfTimeError as error:
        raise UserError(
            f"the reward function {name} took longer than reward.timeout_s={timeout_s:g} seconds",
            where=place,
            why=f"a response without a score cannot be used, and a score of 0 would be wrong (response: {response})",
            fix="make it faster, let it limit its own time, or raise reward.timeout_s (null means no limit)",
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the reward function {name} raised {type(error).__name__}",
            where=place,
            why=f"{error} (response: {response})",
            fix="make it return a score for every response, even an empty or garbled one",
        ) from error


def score_of(fn: RewardFn, result: Any, arguments: Mapping[str, Any], *, where: str = "") -> float:
    """Return the number in the `result` of a reward function. Raise UserError if there is no finite number."""
    score: Any = result.get("score") if isinstance(result, Mapping) else result
    try:
        number = math.nan if isinstance(score, str | bytes | bytearray) else float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        response = shortened(arguments["solution_str"])
        raise UserError(
            f"the reward function {_name(fn)} returned {shortened(result)}",
            where=f"{where}data_source {arguments['data_source']!r}",
            why=f"a reward must be a finite number, or a dict with one under 'score' (response: {response})",
            fix="make it return a number for every response, even an empty or garbled one",
        )
    return number


def _name(fn: RewardFn) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


class OutOfTimeError(Exception):
    """The function took longer than its limit."""


class _Stop(BaseException):
    """Raised inside the function to end it. `except Exception` in the function does not catch it."""


def call_within(seconds: float | None, function: Callable[[], Result]) -> Result:
    """Return `function()`, but stop it after `seconds` (None: no limit). Exceptions of the function are not caught.
    Raise OutOfTimeError if the function was stopped or returned too late.

    In the main thread, a timer signal raises an exception inside the function. This interrupts endless loops, sleeps,
    waiting for a socket, and slow regular expressions. The timer fires every second, in case the function catches the
    exception. If the function sets an alarm itself (`signal.alarm`), the time is checked only when it returns.

    Python delivers signals only to the main thread, but verl calls rewards in other threads. There the function runs
    in a new thread, which is stopped at its next line of Python. If that thread is inside a C function, it continues as
    a daemon, which does not keep the process alive."""
    if seconds is None:
        return function()
    if threading.current_thread() is not threading.main_thread():
        return _in_a_thread(seconds, function)
    started = time.monotonic()
    try:
        with _alarm(seconds):
            result = function()
    except _Stop:
        raise OutOfTimeError from None
    if time.monotonic() - started > seconds:
        raise OutOfTimeError
    return result


@contextmanager
def preserved_alarm() -> Iterator[None]:
    """Let the code inside use the alarm signal. Afterwards restore the caller's timer, less the time that has passed.

    Use this only in the main thread. If the caller's timer was due during the block, it fires right after the block.
    """
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            left = max(remaining - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Stop

    with preserved_alarm():
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _in_a_thread(seconds: float, function: Callable[[], Result]) -> Result:
    outcome: Future[Result] = Future()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome.done():
        return outcome.result()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
    raise OutOfTimeError
