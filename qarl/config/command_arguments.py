"""Read the key=value arguments of a command that is described by a dataclass and not by the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any, TypeVar

from pydantic import BeforeValidator, ValidationError

from qarl.config.errors import nearest
from qarl.errors import UserError

Request = TypeVar("Request")


Commas = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
"""Beside the type of a key: its values are separated by commas."""


def read_request(
    kind: type[Request],
    arguments: Sequence[str],
    *,
    example: str,
    prefix: str = "",
    **defaults: Any,
) -> Request:
    """Return the pydantic dataclass `kind` of `arguments`, each of the form key=value. Raise UserError for the first
    invalid one. `example`: a command line that the message shows. `prefix`: what stands before each key there.
    `defaults`: values of keys that were not given."""
    values: dict[str, Any] = dict(argument.partition("=")[::2] for argument in arguments)
    keys = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # a pydantic dataclass
    if len(values) < len(arguments) or any(
        key in keys and not value for key, value in values.items()
    ):
        why = " ".join(prefix + argument for argument in arguments)
        raise UserError(
            "a key is given twice or is empty",
            where="command line",
            why=why,
            fix=f"write {example}",
        )
    try:
        return kind(**defaults | values)
    except ValidationError as error:
        first = min(
            error.errors(), key=lambda problem: problem["type"] == "missing"
        )  # a wrong name comes first
        key = str(first["loc"][0])
        command = " ".join(takewhile(lambda word: "=" not in word, example.split()[:3]))
        guess = nearest(key.lstrip("-"), keys) if key not in keys else None
        raise UserError(
            f"{prefix}{key}={values.get(key, '')}: {first['msg']}",
            where="command line",
            fix=(f"did you mean {prefix}{guess}=...? " if guess else "")
            + f"write {example} (all keys: {command} --help)",
        ) from error
