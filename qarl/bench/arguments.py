"""What the arguments of several benchmarks have in common (`qarl.config.command_arguments` reads them)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from qarl.config.command_arguments import Commas
from qarl.config.errors import nearest
from qarl.config.types import OneOf
from qarl.errors import UserError
from qarl.schemes import engine_scheme_names

Device = Literal["cuda", "cpu"]
Schemes = Annotated[tuple[Annotated[str, OneOf(engine_scheme_names)], ...], Commas]


def one_of(value: str, known: Collection[str], what: str) -> str:
    """Return `value`. Raise UserError unless it is one of `known`. The error names the most similar one."""
    if value not in known:
        hint = f" (nearest: {near})" if (near := nearest(value, known)) else ""
        raise UserError(
            f"there is no {what} {value!r}", where=what, fix=f"use one of {', '.join(known)}{hint}"
        )
    return value


def check_divides(arguments: Any, part: str, whole: str) -> None:
    """Raise UserError unless the field `part` divides the field `whole`."""
    if getattr(arguments, whole) % getattr(arguments, part):
        raise UserError(f"{part} must divide {whole}", where=f"{whole}={getattr(arguments, whole)}")


def device_of(words: Sequence[str]) -> str:
    """Return the device that `words` name, else cuda if the driver shows a GPU, else cpu, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    default = "cuda" if not hidden and Path("/dev/nvidiactl").exists() else "cpu"
    return next(
        (argument.partition("=")[2] for argument in words if argument.startswith("device=")),
        default,
    )


def check_device(device: str) -> None:
    """Raise UserError if `device` is cuda but PyTorch sees no GPU, or if `device` is cpu but there is a GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU", where="device", fix="set device=cpu")
    if device == "cpu" and torch.cuda.is_available():
        fix = "set device=cuda, or hide the GPU with CUDA_VISIBLE_DEVICES="
        raise UserError(
            "this machine has a GPU, which the trainer would use", where="device=cpu", fix=fix
        )


def as_json(arguments: Any) -> dict[str, Any]:
    """Return the fields of the dataclass for a file that may be published. Paths lose their folders."""
    return dataclasses.asdict(arguments) | {"json": arguments.json and arguments.json.name}
