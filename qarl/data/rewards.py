"""Reward functions by name: the built-in ones, and the user's.

A reward function has the signature of verl's custom rewards, so one function works with every backend:

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None) -> float

It may also return a dict with the number under "score". As in verl, the arguments are passed by keyword. It may be
`async def`. One with the parameter `solution_strs` scores all answers of a batch at once, as with verl's batch manager:

    def reward(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]

The config names the function as `arithmetic`, `math_verify`, `reasoning_gym`, `package.module:function` or
`path/to/file.py:function`. It runs in worker processes (`qarl.data.reward_workers`), which load it by `get_reward_fn`;
`qarl.data.scoring` calls it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.config.types import TURN_REWARDS
from qarl.data.answer_forms import as_latex, last_number, number_of_truth, stated_truth, states
from qarl.data.worker_roles import REWARD, Role
from qarl.errors import UserError
from qarl.side_packages import require

RewardFn = Callable[..., Any]


def arithmetic(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return 1.0 if the last number of the response is that of `ground_truth`, else 0.0.

    Both are read as people write them (`qarl.data.answer_forms`): 72, 072, 72.0, $72 and 1,000 are numbers, and the
    ground truth may also be a solution that ends in "#### 72", or boxed. A ground truth that is no number scores 0.
    """
    truth = number_of_truth(ground_truth)
    return float(truth is not None and last_number(solution_str) == truth)


def math_verify(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
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
    golds = parse(
        f"\\boxed{{{as_latex(truth)}}}", (LatexExtractionConfig(),), parsing_timeout=seconds
    )
    answers = parse(
        solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=seconds
    )
    return float(
        any(verify(gold, answer, timeout_seconds=seconds) for gold in golds for answer in answers)
    )


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return the score of the response by the scorer of its task in reasoning-gym.

    It reads `extra_info`, as `qarl data reasoning_gym` writes it (`qarl.data.reasoning_gym_reward`)."""
    from qarl.data.reasoning_gym_reward import score

    return score(solution_str, extra_info)


def environment(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return the sum of the rewards that `rollout.environment` gave to the turns of a conversation."""
    return float(sum((extra_info or {}).get(TURN_SCORES, ())))


def reads_turn_scores(spec: str) -> bool:
    """Return whether the function may read the rewards of turns. Of the built-in ones only `environment` does."""
    return spec not in BUILTIN or spec in TURN_REWARDS


TURN_SCORES = "turn_scores"
"""Key of `extra_info`: the rewards that the environment gave in a conversation. verl's agent loops have it, too."""
BUILTIN: dict[str, RewardFn] = {
    "arithmetic": arithmetic,
    "environment": environment,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
TAGS_READ = {"reasoning_gym": ("<answer>", "</answer>")}
"""Tags that a built-in function looks for in every response, so that they must not be special tokens."""
_PACKAGES = {"reasoning_gym": "reasoning_gym"}
"""Built-in functions that need a package which no environment has by itself (`qarl.side_packages`)."""
_SCORED_BY = {"reasoning_gym": "reasoning-gym", "math_verify": "math-verify"}
"""Built-in functions whose scores are those of a distribution of Python."""
IN_PROCESS = ("arithmetic", "environment")
"""Built-in functions that need no worker process: they depend on their arguments alone, and always end soon."""


def get_reward_fn(spec: str, role: Role = REWARD) -> RewardFn:
    """Return the reward function that `spec` names. `role`: how errors call its key.

    Raise UserError if there is no such built-in name, module, file or function.
    """
    if spec in _PACKAGES:
        require(_PACKAGES[spec], needed_for=f"{role.key}={spec}")
    if spec in BUILTIN:
        return BUILTIN[spec]
    return load_function(spec, role, f"one of {', '.join(BUILTIN)}, ")


def load_function(spec: str, role: Role, others: str = "") -> Callable[..., Any]:
    """Return the function `package.module:function` or `path/to/file.py:function`. `others`: what else may be given.

    Raise UserError if there is no such module, file or function.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UserError(
            f"unknown {role.noun.removeprefix('the ')} {spec!r}",
            where=role.key,
            fix=f"use {others}package.module:function or path/to/file.py:function",
        )
    module = load_module(source, role.key)
    fn: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(fn):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and key[0] != "_"
        ]
        raise UserError(
            f"{source} has no function {name!r}",
            where=f"{role.key}={spec}",
            why=f"its functions: {', '.join(functions) or 'none'}",
            fix=f"write {source}:NAME with the name of a function",
        )
    return fn


def scorer_version(spec: str, key: str) -> str | None:
    """Return name and version of the package that scores for the built-in function `spec`, or None if none does.

    `key`: of the config, that names the function. Raise UserError if the package is missing."""
    if spec not in _SCORED_BY:
        return None
    package = _SCORED_BY[spec]
    if spec in _PACKAGES:
        require(_PACKAGES[spec], needed_for=f"{key}={spec}")
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of an unknown version"


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


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
