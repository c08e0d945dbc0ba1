"""The tasks of reasoning-gym: find one by its name, and read its parameters from the words of a command line.

A task's parameters are the fields of its config, a dataclass of the library, so their types are the library's own. They
stay texts in a data file, and the scorer reads them again, because a scorer may ask the config of its problems.

Library: https://github.com/open-thought/reasoning-gym (Apache 2.0), tried at 0.1.25.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from qarl.config.errors import nearest
from qarl.config.read_config import parse_value
from qarl.errors import UserError
from qarl.side_packages import require

PACKAGE = "reasoning_gym"
SET_BY_QARL = ("seed", "size")
"""Fields of every config that are no parameters of a task."""
_LISTED = 3
_CLOSE = 0.5


def task_names() -> Sequence[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_tasks())


def check_task(task: str) -> None:
    """Raise UserError, with the nearest names, if there is no such task."""
    names = task_names()
    if task in names:
        return
    close = difflib.get_close_matches(task, names, n=_LISTED, cutoff=_CLOSE)
    close += [name for name in names if task and task in name and name not in close][:_LISTED]
    guess = f"did you mean {', '.join(close)}? " if close else ""
    raise UserError(
        f"reasoning-gym has no task {task!r}",
        where="task",
        fix=f"{guess}`qarl data reasoning_gym --help tasks` lists all {len(names)}",
    )


def parameter_fields(task: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each parameter of a task."""
    check_task(task)
    config = _tasks()[task][1]
    types = typing.get_type_hints(config)
    return {
        field.name: (types[field.name], default_of(field))
        for field in dataclasses.fields(config)
        if field.name not in SET_BY_QARL
    }


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field, or MISSING."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def type_name(hint: Any) -> str:
    """Return a type as one writes it: int, list[str]."""
    plain = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return plain.replace("typing.", "").replace("NoneType", "None")


def parameter_values(
    task: str, words: Mapping[str, str], other_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a task's parameters, which `words` gives as texts.

    A text is read as YAML, or as a list separated by commas. `other_keys`: those of the command, of which an unknown
    parameter may be a typing error. Raise UserError for an unknown parameter or a value of another type."""
    known = parameter_fields(task)
    for name in words:
        if name not in known:
            guess = nearest(name, [*known, *other_keys])
            raise UserError(
                f"the task {task} has no parameter {name}",
                where=f"{name}={words[name]}",
                fix=(f"did you mean {guess}? " if guess else "")
                + f"its parameters: {', '.join(known) or 'none'}",
            )
    return {name: _value(task, name, text, *known[name]) for name, text in words.items()}


def make_dataset(task: str, words: Mapping[str, str], *, seed: int = 1, size: int = 1) -> Any:
    """Return the library's dataset of `size` problems, with the parameters `words`. Problem i depends on `seed` + i.

    Raise UserError if there is no such task, or if it refuses the parameters."""
    values = parameter_values(task, words)
    try:
        return library().create_dataset(task, seed=seed, size=size, **values)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(
            f"the task {task} refuses its parameters",
            where=" ".join(f"{name}={text}" for name, text in words.items()) or f"task={task}",
            why=f"{type(error).__name__}: {error}",
            fix=f"`qarl data reasoning_gym --help {task}` lists them with their defaults",
        ) from error


def library(module: str = "") -> ModuleType:
    """Return the package reasoning_gym, or one of its modules. Raise UserError if it is not installed."""
    require(PACKAGE, needed_for="the source reasoning_gym")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of packages that it imports
        return importlib.import_module(f"{PACKAGE}.{module}" if module else PACKAGE)


def _tasks() -> dict[str, tuple[type, type]]:
    library()
    tasks: dict[str, tuple[type, type]] = library("factory").DATASETS
    return tasks


def _value(task: str, name: str, text: str, hint: Any, default: Any) -> Any:
    """Return `text` as a value of the type `hint`.

    A number is not taken for a truth value or the other way round; a list may have parts of other types."""
    adapter = TypeAdapter(hint)
    try:
        parsed = parse_value(text)
    except yaml.YAMLError:
        parsed = text
    readings = [(parsed, isinstance(parsed, list | dict)), (text, True), (text.split(","), True)]
    for reading, lax in readings:
        try:
            return adapter.validate_python(reading, strict=not lax)
        except ValidationError:
            continue
    usual = "" if default is dataclasses.MISSING else f"; its default is {default}"
    raise UserError(
        f"{name}={text} is not of the type {type_name(hint)}",
        where=f"task {task}",
        why=f"this is the type of {name} in the task's config{usual}",
        fix=f"write {name}=VALUE with such a value; lists as [a, b] or a,b",
    )
