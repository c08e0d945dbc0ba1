"""Call, find and check reward functions, both built-in ones and the user's.

A reward function has the signature of verl's custom rewards, so one function works with both backends:

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float

It may also return a dict with the number under "score". As in verl, the arguments are passed by keyword.

The config names the function as `arithmetic`, `math_verify`, `package.module:function` or `path/to/file.py:function`.

If the function raises, calls `sys.exit`, does not return a finite number or takes longer than `reward.timeout_s`, the
run stops with an error that names the row. If an exception scored 0 instead, the model would learn to avoid the bug. If
a timeout scored 0, the rewards would depend on how busy the machine is. It is also an error if the function changes
`ground_truth` or `extra_info`. All responses to a prompt share these objects, so the next response would be scored
differently.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from difflib import get_close_matches
from functools import lru_cache
from multiprocessing import get_context
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.data.prompts import Prompt, shortened
from qarl.data.time_limit import OutOfTimeError, call_within, preserved_alarm
from qarl.errors import UserError

RewardFn = Callable[..., Any]

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
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
        return _math_verify(solution_str, str(ground_truth))
    return _process_pool().submit(_math_verify, solution_str, str(ground_truth)).result()


def math_verify_within(seconds: int, solution_str: str, ground_truth: str) -> float:
    """Do the same as `math_verify` with a time limit of `seconds`. For data preparation, in the main thread."""
    return _math_verify(solution_str, ground_truth, seconds)


def _math_verify(solution_str: str, ground_truth: str, seconds: int = 5) -> float:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def is_equal(gold: Any, answer: Any) -> bool:
        with preserved_alarm():
            return bool(verify(gold, answer, timeout_seconds=seconds))

    with preserved_alarm():
        golds = parse(f"\\boxed{{{ground_truth}}}", (LatexExtractionConfig(),), parsing_timeout=seconds)
    with preserved_alarm():
        answers = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=seconds)
    return float(any(is_equal(gold, answer) for gold in golds for answer in answers))


@lru_cache(maxsize=1)
def _process_pool() -> ProcessPoolExecutor:
    # "spawn", because it is not safe to fork a process with CUDA or several threads.
    return ProcessPoolExecutor(max_workers=min(4, os.cpu_count() or 1), mp_context=get_context("spawn"))


BUILTIN: dict[str, RewardFn] = {"arithmetic": arithmetic, "math_verify": math_verify}


def get_reward_fn(spec: str) -> RewardFn:
    """Return the reward function that `spec` names.

    Raise UserError if there is no such built-in name, module, file or attribute, if it is not callable, or if it does
    not take the four arguments.
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
            fix=f"write reward.function={source}:NAME with the name of a function",
        ) from None
    _check_signature(fn, spec)
    return fn


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module runs on import and may raise anything, even SystemExit
        raise UserError(
            f"cannot import the module {name!r}",
            where="reward.function",
            why=_in_words(error),
            fix="install the module, or start the run in the module's folder; if the function is in a file, write "
            "reward.function=path/to/file.py:function",
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.modules.pop(name, None)
        raise UserError(
            f"cannot load {path}",
            where="reward.function",
            why=_in_words(error),
            fix="correct the file, or install the packages that it imports",
        ) from error
    return module


def _check_signature(fn: Any, spec: str) -> None:
    where = f"reward.function={spec}"
    if not callable(fn):
        raise UserError(
            "the reward function is not callable",
            where=where,
            why=f"it is a {type(fn).__name__}",
            fix="set reward.function to the name of a function",
        )
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a function in C has no signature; the first call will show whether it works
        return
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise UserError(
            f"the reward function has the wrong signature {signature}",
            where=where,
            why=f"it is called with the keyword arguments {', '.join(_ARGUMENTS)}: {error}",
            fix=f"define it as def {getattr(fn, '__name__', 'reward')}({', '.join(_ARGUMENTS)}) -> float",
        ) from None


def score_responses(
    fn: RewardFn, prompts: Sequence[Prompt], responses: Sequence[str], *, timeout_s: float | None = None
) -> list[float]:
    """Return the score of each `responses[i]`, an answer to `prompts[i]`.

    `timeout_s`: time limit per response, in seconds; None means no limit.

    Raises:
        UserError: `fn` raised (its exception is chained), took longer than `timeout_s`, or did not return a finite
            number (alone or under "score").
    """
    return [_score(fn, prompt, response, timeout_s) for prompt, response in zip(prompts, responses, strict=True)]


def _score(fn: RewardFn, prompt: Prompt, response: str, timeout_s: float | None) -> float:
    arguments = {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }
    result = call_reward(fn, arguments, timeout_s=timeout_s, where=f"row {prompt.index}, ")
    return score_of(fn, result, arguments, where=f"row {prompt.index}, ")


def call_reward(fn: RewardFn, arguments: Mapping[str, Any], *, timeout_s: float | None, where: str = "") -> Any:
    """Return the result of `fn` for the four `arguments`. Raise UserError if `fn` raises, exceeds `timeout_s`, or
    changes one of the arguments.

    `where`: text to show in the error before the data source.
    """
    name, place = _name(fn), f"{where}data_source {arguments['data_source']!r}"
    response = shortened(arguments["solution_str"])
    before = {key: _content(arguments.get(key)) for key in _ARGUMENTS}
    try:
        result = call_within(timeout_s, lambda: fn(**arguments))
    except KeyboardInterrupt:
        raise
    except OutOfTimeError as error:
        raise UserError(
            f"the reward function {name} took longer than reward.timeout_s={timeout_s:g} seconds",
            where=place,
            why=f"a response without a score cannot be used, and a score of 0 would be wrong (response: {response})",
            fix="make it faster, let it limit its own time, or raise reward.timeout_s (null means no limit)",
        ) from error
    except BaseException as error:
        raise UserError(
            f"the reward function {name} raised {type(error).__name__}",
            where=place,
            why=f"{_in_words(error).partition(': ')[2]} (response: {response})",
            fix="make it return a score for every response, even an empty or garbled one",
        ) from error
    changed = [key for key, content in before.items() if content != _content(arguments.get(key))]
    if changed:
        raise UserError(
            f"the reward function {name} changed its argument {changed[0]}",
            where=place,
            why="all responses to a prompt are scored with the same objects, so the change would affect the next score",
            fix=f"change a copy instead: copy.deepcopy({changed[0]})",
        )
    return result


def _content(value: Any) -> bytes | None:
    """Return bytes that differ if `value` was changed, or None if it cannot be pickled and so cannot be compared."""
    if value is None or isinstance(value, str | int | float):
        return None
    try:
        return pickle.dumps(value)
    except Exception:  # objects of the user's data may raise anything
        return None


def score_of(fn: RewardFn, result: Any, arguments: Mapping[str, Any], *, where: str = "") -> float:
    """Return the number in the `result` of a reward function. Raise UserError if there is no finite number."""
    try:
        score: Any = result.get("score") if isinstance(result, Mapping) else result
        if not isinstance(score, Real) and hasattr(score, "item"):  # a scalar of PyTorch
            score = score.item()
        number = float(score) if isinstance(score, Real) else math.nan
    except Exception:  # not a finite number, for example a tensor of several elements, or a huge integer
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


def _in_words(error: BaseException) -> str:
    """Return class and message of an exception. If its `__str__` raises, the message is empty."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: "


def check_reward_fn(fn: RewardFn, prompts: Sequence[Prompt], *, timeout_s: float | None = None) -> None:
    """Call `fn` once, on the first prompt with an empty response, to find bugs before the training starts.

    Raises UserError for the same reasons as `score_responses`.
    """
    score_responses(fn, prompts[:1], [""], timeout_s=timeout_s)
