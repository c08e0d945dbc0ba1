"""Refuses reward functions and prompts that would fail later: after the model is quantized, or in the first step.

TRL takes any text that names no function for a reward model on the Hub, so a typing error in `arithmetic` would end in
a message about the network. A reward is called for the first time after a whole rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.config.errors import nearest
from qarl.data.rewards import BUILTIN
from qarl.errors import UserError, shortened
from qarl.trl.rewards import is_name

OF_TRL = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""What TRL passes to each reward function, by name, beside the columns of the dataset."""
_WHERE = "reward_funcs"
_NOT_PASSED = ("prompt", "completion", "completion_ids")


def check_rewards(reward_funcs: Any, columns: Collection[str]) -> None:
    """Raise UserError for the first of `reward_funcs` that TRL could not call. `columns`: those of the dataset."""
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not functions or reward_funcs is None:
        raise UserError(
            "no reward function was given",
            where=_WHERE,
            fix=f"give a function, or one of the names {', '.join(BUILTIN)} and file.py:function",
        )
    for function in functions:
        if isinstance(function, str):
            _check_name(function)
        elif not isinstance(function, torch.nn.Module):
            _check_function(function, columns)


def _check_name(name: str) -> None:
    guess = nearest(name, BUILTIN)
    is_file = name.endswith(".py")
    if is_name(name) or Path(name).is_dir() or not (guess or is_file):
        return
    raise UserError(
        f"unknown reward function {name!r}",
        where=_WHERE,
        why="the name of a function in a file is file.py:function" if is_file else None,
        fix=f"write {name}:FUNCTION" if is_file else f"did you mean {guess}?",
    )


def _check_function(function: Any, columns: Collection[str]) -> None:
    if not callable(function):
        raise UserError(
            f"a reward function is {shortened(function)}, which cannot be called",
            where=_WHERE,
            fix="give a function, an object with a method __call__, or a name",
        )
    if inspect.isclass(function):
        raise UserError(
            f"a reward function is the class {function.__name__}, not an object of it",
            where=_WHERE,
            why="a call would make an object, which is no list of rewards",
            fix=f"write {function.__name__}()",
        )
    passed = [*OF_TRL, *(column for column in columns if column not in _NOT_PASSED)]
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions that are written in C
        return
    try:
        signature.bind(**dict.fromkeys(passed))
    except TypeError as error:
        raise UserError(
            f"a reward function cannot be called as TRL calls it: {error}",
            where=f"{_WHERE}: {getattr(function, '__name__', type(function).__name__)}{signature}",
            why=f"TRL passes {', '.join(passed)}, each by name",
            fix="name the arguments that you need, and add **kwargs for the others",
        ) from None


def columns_of(data: Any) -> list[str]:
    """Return the names of the columns of a dataset: [] if it is None, or a stream whose columns are not known."""
    return list(getattr(data, "column_names", None) or [])


def check_dataset(data: Any) -> None:
    """Raise UserError if `data` is no dataset of the package `datasets`."""
    if not hasattr(data, "column_names"):
        raise UserError(
            f"a dataset is of the type {type(data).__name__}",
            where="train_dataset, eval_dataset",
            why="TRL needs a dataset of the package datasets",
            fix="make one with datasets.Dataset.from_list(rows), or datasets.load_dataset",
        )


def check_prompts(prompts: Sequence[Any]) -> None:
    """Raise UserError for the first prompt that is neither text nor a list of messages, or that is empty."""
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            usable = bool(prompt.strip())
        else:
            usable = isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))
        if not usable:
            raise UserError(
                f"the prompt of row {row} is {shortened(prompt)}",
                where="train_dataset, eval_dataset: column prompt",
                why="a prompt is text that is not empty, or a list of messages with role and content",
                fix='write "..." or [{"role": "user", "content": "..."}]',
            )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()
