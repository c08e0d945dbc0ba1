"""Refuses fields that `QaRLConfig` does not have, and values that are no numbers where numbers belong.

A dataclass raises TypeError for the first unknown field and checks no value. TRL and transformers compare and divide
the values in their own `__post_init__`, where a text or a zero ends in an error about operands.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from qarl.config.errors import nearest
from qarl.config.other_names import counterpart
from qarl.errors import UserError, shortened

_NUMBERS = {int: "a whole number", float: "a number", bool: "True or False"}
"""The types that are checked, in words. Fields of other types take more than their annotations say."""
SMALLEST = {
    "num_generations": (2, "an advantage compares the responses to one prompt"),
    "num_generations_eval": (1, "each prompt needs a response"),
    "per_device_train_batch_size": (1, "a step needs responses"),
    "gradient_accumulation_steps": (1, "a step needs responses"),
    "steps_per_generation": (1, "a rollout serves at least one step"),
    "generation_batch_size": (1, "a step needs responses"),
    "num_iterations": (1, "a step makes at least one update"),
    "max_completion_length": (1, "a response has at least one token"),
}
"""Field -> its smallest value, and why."""
GONE = {"max_prompt_length": "TRL has no such field any more; filter or shorten the dataset"}


def check_names(kind: type, given: Iterable[str], other_names: Mapping[str, str]) -> None:
    """Raise UserError if the class `kind` of settings does not take one of the names `given`.

    `other_names`: names of QaRL's config -> the fields of `kind` that they are called here."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]  # of this very class
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    unknown = [name for name in given if name not in parameters]
    if not unknown:
        return
    advice = [_advice(name, [*parameters][1:], other_names) for name in unknown]
    raise UserError(
        f"{kind.__name__} has no field {', '.join(unknown)}",
        where=", ".join(unknown),
        fix="; ".join(advice),
    )


def _advice(name: str, known: Iterable[str], other_names: Mapping[str, str]) -> str:
    if name in GONE:
        return f"{name}: {GONE[name]}"
    equivalent = counterpart(name)
    guess = other_names.get(name) or (other_names.get(equivalent.key) if equivalent else None)
    guess = guess or nearest(name, known) or nearest(name, other_names)
    guess = other_names.get(guess or "", guess)
    if guess is None:
        return f"{name}: leave it out; docs/learn/trl.md and TRL's GRPOConfig describe the fields"
    return f"{name}: did you mean {guess}?"


def check_values(args: Any) -> None:
    """Raise UserError for the first field of the dataclass `args` whose value has the wrong type or is too small."""
    annotations = typing.get_type_hints(type(args))  # HfArgumentParser narrows `field.type`
    for field in fields(args):
        value = getattr(args, field.name, None)
        kinds = _kinds(annotations[field.name])
        if kinds <= {*_NUMBERS, types.NoneType} and not _fits(value, kinds):
            belongs = " or ".join(words for kind, words in _NUMBERS.items() if kind in kinds)
            raise UserError(
                f"{field.name}={shortened(value)} is of type {type(value).__name__}",
                where=field.name,
                why=f"it must be {belongs}",
                fix=f"set it to {belongs}, without quotation marks{_in_yaml(value)}",
            )
        smallest, why = SMALLEST.get(field.name, (None, None))
        if smallest is not None and value is not None and value < smallest:
            raise UserError(
                f"{field.name}={value} is below {smallest}",
                where=field.name,
                why=why,
                fix=f"set it to {smallest} or more",
            )


def _in_yaml(value: Any) -> str:
    """Return what to write in YAML for a text such as 1e-6, which is a number everywhere else."""
    try:
        number = float(value) if isinstance(value, str) and "e" in value.lower() else None
    except ValueError:
        return ""
    return (
        ""
        if number is None
        else f"; in YAML a number needs a point, as in 1.0e-6, or {value} is text"
    )


def _kinds(annotation: Any) -> set[Any]:
    """Return the types of a union, or the one type."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set(typing.get_args(annotation))
    return {annotation}


def _fits(value: Any, kinds: set[Any]) -> bool:
    if value is None:
        return types.NoneType in kinds
    if bool in kinds:
        return isinstance(value, bool) or value in (0, 1)
    if isinstance(value, bool):
        return False
    return isinstance(value, Real if float in kinds else Integral)


def refused_by_trl(args: Any, error: Exception) -> UserError:
    """Return the error of TRL's or transformers' own check of `args`. Its `where` names the fields that it is about."""
    text = " ".join(str(error).split())
    words = text.replace("`", " ").replace("(", " ").replace("=", " ").split()
    names = [field.name for field in fields(args)]
    about = [name for name in names if name in words]
    if not about:
        given = {name: getattr(args, name, None) for name in names}
        about = [name for name, value in given.items() if isinstance(value, str) and value in words]
    return UserError(
        f"{type(args).__name__} refuses its settings: {text[:400]}",
        where=", ".join(f"{name}={shortened(getattr(args, name, None))}" for name in about) or None,
        fix="correct these fields; TRL's GRPOConfig and transformers' TrainingArguments describe them",
    )
