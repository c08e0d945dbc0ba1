"""The machine a pre-flight judges for: this one, or a GPU machine that is elsewhere.

`doctor.*` arguments choose it, apart from the run's own keys: `qarl doctor --help` describes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qarl.errors import UserError
from qarl.process import runs_on_cpu

OPTIONS = ("device", "gpu_memory_gib", "gpu_capability", "json")
GPUS = {
    "a100": (80, 79.2),
    "a100-40gb": (80, 39.4),
    "l40s": (89, 44.4),
    "rtx4090": (89, 23.5),
    "h100": (90, 79.2),
    "h20": (90, 95.1),
    "h200": (90, 139.8),
    "b200": (100, 178.4),
}
"""Compute capability times ten, and the GiB that the driver reports: less than the name says."""


@dataclass(frozen=True)
class Target:
    """`device`: "cpu" or "cuda"; `here`: this very machine, so that its own state is checked too.

    `capability`: compute capability times ten, and `gpu_memory_bytes`, of one GPU; None if unknown. `gpus`: how
    many this machine has; None elsewhere, where the run's own count is believed.
    """

    device: str
    name: str
    here: bool
    capability: int | None = None
    gpu_memory_bytes: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Arguments:
    """The command line taken apart: the run's own arguments, and the doctor's options by name."""

    run: list[str]
    options: dict[str, str]


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Take the `doctor.*` options out of a command line; UserError for one that does not exist or has no value."""
    run: list[str] = []
    options: dict[str, str] = {}
    for argument in argv:
        if not argument.startswith("doctor."):
            run.append(argument)
            continue
        name, _, value = argument.removeprefix("doctor.").partition("=")
        if name not in OPTIONS or not value or name in options:
            known = ", ".join(f"doctor.{option}=..." for option in OPTIONS)
            why = "it is given twice" if name in options else "the doctor has no such option, or it has no value"
            raise UserError(f"cannot use {argument!r}", where="command line", why=why, fix=f"give each once: {known}")
        options[name] = value
    return Arguments(run, options)


def find_target(options: dict[str, str], backend: str = "local") -> Target:
    """The machine that the options describe; for what they leave out, this machine as `backend` uses it.

    UserError for a value that makes no sense.
    """
    elsewhere = {"device", "gpu_memory_gib", "gpu_capability"} & set(options)
    if not elsewhere:
        return this_machine(backend)
    name = options.get("device", "cuda").lower()
    if name != "cuda" and name not in GPUS:
        raise UserError(
            f"doctor.device={name} is not known",
            where="command line",
            fix=f"one of {', '.join(GPUS)}, or cuda with doctor.gpu_memory_gib and doctor.gpu_capability",
        )
    capability, gib = GPUS.get(name, (None, None))
    if "gpu_memory_gib" in options:
        gib = _number(options, "gpu_memory_gib", "80")
    if "gpu_capability" in options:
        capability = round(10 * _number(options, "gpu_capability", "9.0"))
    memory = None if gib is None else int(gib * 2**30)
    described = name if gib is None else f"{name} with {gib:g} GiB"
    return Target("cuda", f"another machine ({described})", False, capability, memory)


def this_machine(backend: str = "local") -> Target:
    import torch

    if runs_on_cpu(backend) or not torch.cuda.is_available():
        return Target("cpu", "this machine (CPU)", True)
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.device_count()
    name = f"this machine ({count} x {properties.name})"
    return Target("cuda", name, True, 10 * major + minor, properties.total_memory, count)


def _number(options: dict[str, str], name: str, example: str) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:  # not with NaN either
        raise UserError(
            f"doctor.{name}={options[name]} is not a number above 0 and below a million",
            where="command line",
            fix=f"for example doctor.{name}={example}",
        )
    return value
