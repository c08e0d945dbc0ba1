"""Read the key=value arguments of a command that is described by a dataclass and not by the config."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError

from qarl.config.errors import nearest
from qarl.errors import UserError

Request = TypeVar("Request")


Commas = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
"""Beside the type of a key: its values are separated by commas."""


def writes_json(*keys: str) -> AfterValidator:
    """Beside `Path`, the type of a key that names a JSON file to write, whose object has `keys`. What cannot be written
    is refused before any work, and so is a file that would be lost, because it is no earlier file of this kind."""
    return AfterValidator(partial(_writable, keys=frozenset(keys)))


def _writable(path: Path, *, keys: frozenset[str]) -> Path:
    if path.is_dir():
        raise ValueError("it is a folder, but names the file to write")
    if path.exists() and not path.is_file():
        raise ValueError("it is no ordinary file")
    if path.is_file() and path.stat().st_size and not _has_keys(path, keys):
        raise ValueError(
            "a file of this name exists, and this command did not write it; move it away, or name another one"
        )
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} is no folder in which files can be written")
    return path


def _has_keys(path: Path, keys: frozenset[str]) -> bool:
    """Return whether the file is a JSON object with `keys`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and keys <= content.keys()


def read_request(
    kind: type[Request],
    arguments: Sequence[str],
    *,
    example: str,
    prefix: str = "",
    positional: str = "",
    **defaults: Any,
) -> Request:
    """Return the pydantic dataclass `kind` of `arguments`, each of the form key=value. Raise UserError for the first
    invalid one. `example`: a command line that the message shows. `prefix`: what stands before each key there.
    `positional`: the key whose value is an argument without `=`. `defaults`: values of keys that were not given."""
    keys = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # a pydantic dataclass
    values: dict[str, Any] = {}
    for argument in arguments:
        word = argument
        if "=" not in argument and positional and positional not in values:
            word = f"{positional}={argument}"
        key, value = _key_and_value(word, keys, prefix, example)
        if key in values:
            what = f"{prefix}{key} is given twice: {values[key]}, then {value}"
            raise UserError(what, where="command line", fix="keep one of them")
        values[key] = value
    try:
        return kind(**defaults | values)
    except ValidationError as error:
        first = min(
            error.errors(), key=lambda problem: problem["type"] == "missing"
        )  # a wrong name comes first
        key = str(first["loc"][0])
        command = " ".join(takewhile(lambda word: "=" not in word, example.split()[:3]))
        guess = nearest(key, keys) if key not in keys else None
        message = first["msg"].removeprefix("Value error, ")
        what = f"{prefix}{key}={values.get(key, '')}: {message}"
        if first["type"] == "missing":
            what = f"{prefix}{key} is missing"
        elif key not in keys:
            what = f"there is no key {prefix}{key}"
        raise UserError(
            what,
            where="command line",
            fix=(f"did you mean {prefix}{guess}=...? " if guess else "")
            + f"write {example} (all keys: {command} --help)",
        ) from error


def _key_and_value(
    argument: str, keys: Collection[str], prefix: str, example: str
) -> tuple[str, str]:
    key, equals, value = argument.partition("=")
    if not equals and key not in keys:
        raise UserError(
            f"unexpected argument {argument!r}",
            where="command line",
            why="it is not of the form KEY=VALUE",
            fix=f"write {example}",
        )
    if key in keys and not value:
        raise UserError(
            f"{prefix}{key} has no value",
            where="command line",
            fix=f"write {prefix}{key}=VALUE, or leave it out",
        )
    return key, value
