"""Read key=value arguments into a dataclass. Its field names are the keys.

Unknown keys and invalid values are reported before any work is done. All numbers must be positive.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from qarl.errors import UserError

T = TypeVar("T")
DEVICES = ("cuda", "cpu")


def read(cls: type[T], given: Sequence[str], choices: Mapping[str, Collection[str]] | None = None, **fixed: Any) -> T:
    """Return a `cls` from the `given` key=value pairs. A value is an int, float, str, Path, or comma-separated list.

    `choices`: key -> its valid names. `fixed`: fields that the user cannot set. Raise UserError if an argument is not
    key=value, a key is unknown, or a value is invalid."""
    hints, values = get_type_hints(cls), dict(fixed)
    keys = [field.name for field in dataclasses.fields(cls) if field.name not in fixed]  # type: ignore[arg-type]  # a dataclass
    for argument in given:
        key, equals, text = argument.partition("=")
        if not equals or not text:
            raise UserError(f"{argument!r} is not key=value", where="qarl.bench", fix="write key=value, e.g. json=FILE")
        one_of(key, keys, "key")
        values[key] = _convert(key, text, hints[key])
        for name in values[key] if isinstance(values[key], tuple) else (values[key],):
            if choices and key in choices:
                one_of(str(name), choices[key], key)
    return cls(**values)


def _convert(key: str, text: str, hint: Any) -> Any:
    if get_origin(hint) is types.UnionType:
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        (kind, *_) = get_args(hint)
        return tuple(_number(key, part, kind) for part in text.split(","))
    return _number(key, text, hint)


def _number(key: str, text: str, kind: type) -> Any:
    """Convert `text` to a number of type `kind`. Raise UserError if this fails or if the number is not above 0."""
    try:
        value = kind(text)
    except ValueError as error:
        raise _invalid(key, text, kind) from error
    if kind in (int, float) and not (math.isfinite(value) and value > 0):
        raise _invalid(key, text, kind)
    return value


def _invalid(key: str, text: str, kind: type) -> UserError:
    meant = {int: "a positive integer", float: "a number above 0"}.get(kind, kind.__name__)
    return UserError(f"{key} must be {meant}, got {text!r}", where=key)


def one_of(value: str, known: Collection[str], what: str) -> None:
    """Raise UserError unless `value` is one of `known`. The error names the most similar one."""
    if value not in known:
        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(f"there is no {what} {value!r}", where=what, fix=f"use one of {', '.join(known)}{hint}")


def check_divides(arguments: Any, part: str, whole: str) -> None:
    """Raise UserError unless the field `part` divides the field `whole`."""
    if getattr(arguments, whole) % getattr(arguments, part):
        raise UserError(f"{part} must divide {whole}", where=f"{whole}={getattr(arguments, whole)}")


def device_of(given: Sequence[str]) -> str:
    """Return `given`. If it is empty, return cuda if the driver shows a GPU, else cpu. This does not import torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    default = "cuda" if not hidden and Path("/dev/nvidiactl").exists() else "cpu"
    return next((argument.partition("=")[2] for argument in given if argument.startswith("device=")), default)


def check_device(device: str) -> None:
    """Raise UserError if `device` is cuda but PyTorch sees no GPU, or if `device` is cpu but there is a GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU", where="device", fix="set device=cpu")
    if device == "cpu" and torch.cuda.is_available():
        fix = "set device=cuda, or hide the GPU with CUDA_VISIBLE_DEVICES="
        raise UserError("this machine has a GPU, which the trainer would use", where="device=cpu", fix=fix)


def as_json(arguments: Any) -> dict[str, Any]:
    """Return the fields of the dataclass for a file that may be published. Paths lose their folders."""
    return {
        field.name: value.name if isinstance(value, Path) else value
        for field in dataclasses.fields(arguments)
        for value in (getattr(arguments, field.name),)
    }
