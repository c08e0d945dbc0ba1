"""The arguments of a benchmark: key=value pairs, read into a dataclass whose fields are the keys, and models by name.

Unknown keys and invalid values are reported before any work is done.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qarl.errors import UserError

T = TypeVar("T")
DEVICES = ("cuda", "cpu")


def read(
    cls: type[T], words: Sequence[str], choices: Mapping[str, Collection[str]] = MappingProxyType({}), **fixed: Any
) -> T:
    """Return a `cls` from the key=value pairs `words`. The values of a tuple are separated by commas.

    `choices`: key -> its valid names. `fixed`: fields that the user cannot set. Raise UserError if an argument is not
    key=value, a key is unknown, or a value is invalid."""
    hints, values = get_type_hints(cls, include_extras=True), dict(fixed)
    for argument in words:
        key, _, text = argument.partition("=")
        if not text:
            raise UserError(f"{argument!r} is not key=value", where="qarl.bench", fix="write key=value, e.g. json=FILE")
        one_of(key, [name for name in hints if name not in fixed], "key")
        several = tuple in [get_origin(hint) for hint in (hints[key], *get_args(hints[key]))]
        names = text.split(",") if several else [text]
        for name in names if key in choices else ():
            one_of(name, choices[key], key)
        values[key] = names if several else text
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0])
        raise UserError(f"{where}: {first['msg']}, got {values[where]!r}", where=where) from None


def one_of(value: str, known: Collection[str], what: str) -> str:
    """Return `value`. Raise UserError unless it is one of `known`. The error names the most similar one."""
    if value not in known:
        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(f"there is no {what} {value!r}", where=what, fix=f"use one of {', '.join(known)}{hint}")
    return value


def check_divides(arguments: Any, part: str, whole: str) -> None:
    """Raise UserError unless the field `part` divides the field `whole`."""
    if getattr(arguments, whole) % getattr(arguments, part):
        raise UserError(f"{part} must divide {whole}", where=f"{whole}={getattr(arguments, whole)}")


def device_of(words: Sequence[str]) -> str:
    """Return the device that `words` name, else cuda if the driver shows a GPU, else cpu, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    default = "cuda" if not hidden and Path("/dev/nvidiactl").exists() else "cpu"
    return next((argument.partition("=")[2] for argument in words if argument.startswith("device=")), default)


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
    return dataclasses.asdict(arguments) | {"json": arguments.json and arguments.json.name}
