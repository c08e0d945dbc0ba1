"""The machine for which the doctor checks a run: this one or a different GPU machine.

The arguments `doctor.*` choose it, and are not keys of the run. `qarl doctor --help` describes them.
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
"""Compute capability times ten, and memory in GiB as the driver reports it, which is less than advertised."""


@dataclass(frozen=True)
class Target:
    """The machine for which the doctor checks a run.

    `device`: "cpu" or "cuda". `here`: whether it is this machine, so that its current state is checked too.
    `capability` (compute capability times ten) and `gpu_memory_bytes` describe one GPU, or are None if unknown. `gpus`:
    number of GPUs. None means a different machine, which is assumed to have as many GPUs as the run needs.
    """

    device: str
    name: str
    here: bool
    capability: int | None = None
    gpu_memory_bytes: int | None = None
    gpus: int | None = None


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the run's own arguments, and the `doctor.*` options by name.

    Raise UserError if an option does not exist, has no value or is given twice.
    """
    run: list[str] = []
    options: dict[str, str] = {}
    for argument in argv:
        if not argument.startswith("doctor."):
            run.append(argument)
            continue
        name, _, value = argument.removeprefix("doctor.").partition("=")
        if name not in OPTIONS or not value or name in options:
            known = ", ".join(f"doctor.{option}=..." for option in OPTIONS)
            why = "it is given twice" if name in options else "the doctor has no such option, or its value is missing"
            fix = f"give each option at most once: {known}"
            raise UserError(f"cannot use {argument!r}", where="command line", why=why, fix=fix)
        options[name] = value
    return run, options


def find_target(options: dict[str, str], backend: str = "local") -> Target:
    """Return the GPU machine that the options describe. Without them, return this machine's GPUs or CPU.

    Raise UserError if the device is not known, or if a number is not positive or is too large.
    """
    elsewhere = {"device", "gpu_memory_gib", "gpu_capability"} & set(options)
    if not elsewhere:
        return this_machine(backend)
    name = options.get("device", "cuda").lower()
    if name != "cuda" and name not in GPUS:
        raise UserError(
            f"doctor.device={name} is not known",
            where="command line",
            fix=f"choose {', '.join(GPUS)}, or cuda with doctor.gpu_memory_gib and doctor.gpu_capability",
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
    if not 0 < value < 1e6:  # true for NaN too
        raise UserError(
            f"doctor.{name}={options[name]} is not a number above 0 and below a million",
            where="command line",
            fix=f"for example doctor.{name}={example}",
        )
    return value
