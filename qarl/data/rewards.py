"""Call, find and check reward functions, both built-in ones and the user's.

A reward function has the signature of verl's custom rewards, so one function works with every backend:

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float

It may also return a dict with the number under "score". As in verl, the arguments are passed by keyword.

The config names the function as `arithmetic`, `math_verify`, `package.module:function` or `path/to/file.py:function`.
It runs in worker processes (`qarl.data.reward_workers`), which load it by `get_reward_fn`.

If the function raises, calls `sys.exit`, does not return a finite number or takes longer than `reward.timeout_s`, the
run stops with an error that names the row. If an exception scored 0 instead, the model would learn to avoid the bug. If
a timeout scored 0, the rewards would depend on how busy the machine is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qarl.data.answer_forms import as_latex, last_number, number_of_truth, stated_truth, states
from qarl.data.reward_outcomes import ASYNC, Outcome, Scored
from qarl.data.reward_workers import InProcessReward, Reward, WorkerReward
from qarl.errors import UserError, shortened

if TYPE_CHECKING:
    from qarl.data.prompts import Prompt

RewardFn = Callable[..., Any]


def arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number of the response is that of `ground_truth`, else 0.0.

    Both are read as people write them (`qarl.data.answer_forms`): 72, 072, 72.0, $72 and 1,000 are numbers, and the
    ground truth may also be a solution that ends in "#### 72", or boxed. A ground truth that is no number scores 0.
    """
    truth = number_of_truth(ground_truth)
    return float(truth is not None and last_number(solution_str) == truth)


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if an answer in the response (LaTeX, boxed or plain) equals `ground_truth` mathematically, else 0.0.

    The ground truth may also be a solution that ends in "#### 72", or boxed. An answer in words counts, too, if it has
    the text of the ground truth, for example "The answer is (A)" for A (`qarl.data.answer_forms`).

    Uses the math-verify package with the settings of verl's `math_verify` reward. The package's time limit (5 seconds
    to parse, 5 to compare) uses an alarm signal, so this must be called in the main thread of a process.
    """
    return math_verify_within(5, solution_str, str(ground_truth))


def math_verify_within(seconds: int, solution_str: str, ground_truth: str) -> float:
    """Do the same as `math_verify` with a time limit of `seconds`."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    truth = stated_truth(ground_truth)
    if states(solution_str, truth):
        return 1.0
    golds = parse(f"\\boxed{{{as_latex(truth)}}}", (LatexExtractionConfig(),), parsing_timeout=seconds)
    answers = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=seconds)
    return float(any(verify(gold, answer, timeout_seconds=seconds) for gold in golds for answer in answers))


BUILTIN: dict[str, RewardFn] = {"arithmetic": arithmetic, "math_verify": math_verify}
IN_PROCESS = ("arithmetic",)
"""Built-in functions that need no worker process: they depend on their arguments alone, and always end soon."""


def find_reward(spec: str, workers: int = 1, folder: str | None = None) -> Reward:
    """Return the reward that `spec` names (`reward.function`). Its function is loaded in its first worker process.

    `workers`: most worker processes (`reward.workers`). `folder`: the folder that they work in; None: the current one.
    """
    if spec in IN_PROCESS:
        return InProcessReward(spec, BUILTIN[spec])
    return WorkerReward(spec, workers, folder)


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
    if inspect.iscoroutinefunction(fn):
        what = f"the reward function {name} {ASYNC.what}"
        raise UserError(what, where=f"reward.function={spec}", why=ASYNC.why, fix=ASYNC.fix)
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
    reward: Reward, prompts: Sequence[Prompt], responses: Sequence[str], *, timeout_s: float | None = None
) -> list[float]:
    """Return the score of each `responses[i]`, an answer to `prompts[i]`.

    `timeout_s`: time limit per response, in seconds; None means no limit.

    Raises:
        UserError: the function cannot be loaded, raised an exception, took longer than `timeout_s`, or did not return a
            finite number (alone or under "score"). It names the first such row.
    """
    rows = [reward_arguments(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    return score_rows(reward, rows, [f"row {prompt.index}, " for prompt in prompts], timeout_s=timeout_s)


def score_rows(
    reward: Reward, rows: Sequence[Mapping[str, Any]], places: Sequence[str], *, timeout_s: float | None
) -> list[float]:
    """Do the same as `score_responses` with the arguments of each call. `places`: a text for each, for errors."""
    futures = [reward.submit(row, timeout_s) for row in rows]
    scores = []
    try:
        for row, place, future in zip(rows, places, futures, strict=True):
            outcome = future.result()
            scores.append(scored(reward.name, outcome, row, where=place).score)
    except BaseException:
        reward.stop()
        raise
    return scores


def reward_arguments(prompt: Prompt, response: str) -> dict[str, Any]:
    """Return the four arguments of a reward function."""
    return {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


def scored(name: str, outcome: Outcome, arguments: Mapping[str, Any], *, where: str = "") -> Scored:
    """Return `outcome` if it is a score. Otherwise raise UserError, which names the row.

    `name`: of the function. `arguments`: those of the call. `where`: text to show before the data source.
    """
    if isinstance(outcome, Scored):
        return outcome
    raise UserError(
        f"the reward function {name} {outcome.what}",
        where=f"{where}data_source {arguments['data_source']!r}",
        why=f"{outcome.why} (response: {shortened(arguments['solution_str'])})",
        fix=outcome.fix,
    )


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
