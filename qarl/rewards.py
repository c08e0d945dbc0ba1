"""Reward functions: the built-in ones, the user's, and the checks around both.

A reward function has the signature of verl's custom rewards, so one function serves both backends:

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float

A dict with the number under "score" is accepted too.

It is named in the config by `arithmetic`, `math_verify`, `package.module:function` or `path/to/file.py:function`. It is
called with keyword arguments, as verl calls it. A reward that raises or is not a finite number stops the run with the
row at fault: scored as 0 it would teach the model whatever avoids the bug.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from multiprocessing import get_context
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.data import Prompt
from qarl.errors import UserError

RewardFn = Callable[..., Any]

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
# A sign belongs to a number only where it cannot be a subtraction: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\d+(?:\.\d+)?", flags=re.ASCII)


def arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last number of the response is the integer `ground_truth`, else 0.0.

    Leading zeros do not count; a number with decimals is no integer; thousands separators are not understood.
    """
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and _canonical(numbers[-1]) == _canonical(str(ground_truth).strip()))


def _canonical(number: str) -> str:
    """`number` without leading zeros; text, because `int` refuses thousands of digits and a model can write them."""
    magnitude = number.removeprefix("-").lstrip("0") or "0"
    return f"-{magnitude}" if number.startswith("-") and magnitude != "0" else magnitude


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if an answer in the response equals `ground_truth` mathematically (LaTeX, boxed or plain), else 0.0.

    Uses the math-verify package with the settings of verl's `math_verify` reward. Its time limit (5 seconds to parse,
    5 to compare) is an alarm signal, which only a main thread can take: from any other thread the work goes to a
    process of its own, as in verl. In a main thread an alarm of the caller's is put back afterwards.
    """
    if threading.current_thread() is threading.main_thread():
        with _preserved_alarm():
            return _math_verify(solution_str, str(ground_truth))
    return _process_pool().submit(_math_verify, solution_str, str(ground_truth)).result()


def math_verify_within(seconds: int, solution_str: str, ground_truth: str) -> float:
    """`math_verify` with another time limit, for data preparation; in a main thread only."""
    with _preserved_alarm():
        return _math_verify(solution_str, ground_truth, seconds)


def _math_verify(solution_str: str, ground_truth: str, seconds: int = 5) -> float:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{ground_truth}}}", (LatexExtractionConfig(),), parsing_timeout=seconds)
    answers = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=seconds)
    return float(any(verify(g, answer, timeout_seconds=seconds) for g in gold for answer in answers))


@contextmanager
def _preserved_alarm() -> Iterator[None]:
    remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)


@lru_cache(maxsize=1)
def _process_pool() -> ProcessPoolExecutor:
    # "spawn": a fork of a process with CUDA or several threads is not safe.
    return ProcessPoolExecutor(max_workers=min(4, os.cpu_count() or 1), mp_context=get_context("spawn"))


BUILTIN: dict[str, RewardFn] = {"arithmetic": arithmetic, "math_verify": math_verify}


def get_reward_fn(spec: str) -> RewardFn:
    """The reward function that `spec` names.

    Raises:
        UserError: no such built-in name, module, file or attribute; what is there is not a function, or does not take
            the four arguments.
    """
    if spec in BUILTIN:
        return BUILTIN[spec]
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        nearest = get_close_matches(spec, BUILTIN, n=1)
        raise UserError(
            f"unknown reward function {spec!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""),
            where="reward.function",
            fix=f"use one of {', '.join(BUILTIN)}, package.module:function or path/to/file.py:function",
        )
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    try:
        fn = getattr(module, name)
    except AttributeError:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        nearest = get_close_matches(name, functions, n=1)
        raise UserError(
            f"{source} has no {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""),
            where=f"reward.function={spec}",
            why=f"its functions: {', '.join(functions) or 'none'}",
            fix=f"write reward.function={source}:NAME with one of them",
        ) from None
    _check_signature(fn, spec)
    return fn


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module runs on import and may raise anything
        raise UserError(
            f"cannot import the module {name!r}",
            where="reward.function",
            why=f"{type(error).__name__}: {error}",
            fix="install it or start from its folder; a file is named by its path, path/to/file.py:function",
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(
            f"no such file: {path}",
            where="reward.function",
            why=f"looked in {path.absolute().parent}",
            fix="correct the path; it is relative to the folder that the run starts in",
        )
    name = f"qarl_reward_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(
            f"cannot load {path}",
            where="reward.function",
            why=f"{type(error).__name__}: {error}",
            fix="correct the file, or install what it imports",
        ) from error
    return module


def _check_signature(fn: Any, spec: str) -> None:
    where = f"reward.function={spec}"
    if not callable(fn):
        raise UserError(
            "the reward function is not callable",
            where=where,
            why=f"it is a {type(fn).__name__}",
            fix="name a function",
        )
    try:
        signature = inspect.signature(fn)
    except ValueError:  # built in C: the call itself will tell
        return
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise UserError(
            f"the reward function has the wrong signature {signature}",
            where=where,
            why=f"called with {', '.join(_ARGUMENTS)} by name: {error}",
            fix=f"def {getattr(fn, '__name__', 'reward')}({', '.join(_ARGUMENTS)}) -> float",
        ) from None


def score_responses(fn: RewardFn, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """The score of `responses[i]`, an answer to `prompts[i]`, for every i.

    Raises:
        UserError: `fn` raised, or returned something else than a finite number or a dict with one under "score"; the
            exception of `fn` is chained.
    """
    return [_score(fn, prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def _score(fn: RewardFn, prompt: Prompt, response: str) -> float:
    where = f"row {prompt.index}, data_source {prompt.data_source!r}"
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        result = fn(
            data_source=prompt.data_source,
            solution_str=response,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
    except Exception as error:
        raise UserError(
            f"the reward function {name} raised {type(error).__name__}",
            where=where,
            why=f"{error} (response: {_shortened(response)})",
            fix="make it return a score for any response, an empty or a garbled one too",
        ) from error
    score: Any = result.get("score") if isinstance(result, Mapping) else result
    if not isinstance(score, Real) and hasattr(score, "item"):  # a scalar of PyTorch
        try:
            score = score.item()
        except (ValueError, RuntimeError):
            score = None
    if not isinstance(score, Real) or not math.isfinite(score):
        raise UserError(
            f"the reward function {name} returned {_shortened(result)}",
            where=where,
            why=f"a reward is a finite number or a dict with one under 'score' (response: {_shortened(response)})",
            fix="make it return a number for any response, an empty or a garbled one too",
        )
    return float(score)


def _shortened(value: Any, length: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."


def check_reward_fn(fn: RewardFn, prompts: Sequence[Prompt]) -> None:
    """Calls `fn` once, on the first prompt with an empty response, so that a broken one stops before the work starts.

    Raises:
        UserError: as `score_responses`.
    """
    score_responses(fn, prompts[:1], [""])
