"""The machine of a run: its device, its CPU or GPUs, and the packages of its environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
from pydantic import PositiveFloat

from qarl.config import Config
from qarl.config.command_arguments import writes_json
from qarl.errors import UserError
from qarl.process import cpu_fields, runs_on_cpu, vllm_missing, vllm_unusable
from qarl.schemes import Cpu, Scheme, get_scheme
from qarl.schemes.kernel_choice import KernelChoice

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
UNKNOWN_GPU_BYTES = int(79.2 * 2**30)
"""Memory that an 80 GB GPU reports. Estimates of verl's runs on a machine without a GPU use it."""


@dataclass(frozen=True)
class Machine:
    """The machine for which a run is checked.

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

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def this_machine(backend: str = "local") -> Machine:
    """Return the machine of this process. With VERL_PLATFORM=nvidia and no GPU, Ray's GPUs are on other machines."""
    if runs_on_cpu(backend):
        return Machine("cpu", "this machine (CPU)", True)
    if not torch.cuda.is_available():
        return Machine("cuda", "Ray's GPUs", True)
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.device_count()
    name = f"this machine ({count} x {properties.name})"
    return Machine("cuda", name, True, 10 * major + minor, properties.total_memory, count)


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})
class DoctorOptions:
    """The doctor's own options, `doctor.NAME=VALUE`."""

    device: Literal["cuda", *GPUS] | None = None  # type: ignore[valid-type]  # names that are not written out
    gpu_memory_gib: PositiveFloat | None = None
    gpu_capability: PositiveFloat | None = None
    json: Annotated[Path, writes_json("exit_code", "findings")] | None = None


def find_machine(options: DoctorOptions, backend: str = "local") -> Machine:
    """Return the GPU machine that the doctor's options describe. Without them, return this machine."""
    if not (options.device or options.gpu_memory_gib or options.gpu_capability):
        return this_machine(backend)
    name = options.device or "cuda"
    capability, gib = GPUS.get(name, (None, None))
    gib = options.gpu_memory_gib or gib
    capability = round(10 * options.gpu_capability) if options.gpu_capability else capability
    memory = None if gib is None else int(gib * 2**30)
    described = name if gib is None else f"{name} with {gib:g} GiB"
    return Machine("cuda", f"another machine ({described})", False, capability, memory)


def cpu_flags() -> set[str]:
    """Return the instruction sets of this CPU, as Linux names them. The set is empty on ARM and without Linux."""
    return set(cpu_fields().get("flags", "").split())


def check_cpu(config: Config) -> None:
    """Raise UserError if this CPU cannot make rollouts with `quant.scheme`."""
    if config.quant.kernels.dequantizes:  # a BF16 product, which every CPU has
        return
    cpu = Cpu(frozenset(cpu_flags()), tiles=torch.cpu._is_amx_tile_supported())
    refusal = get_scheme(config.quant.scheme).cpu_refusal(cpu, os.environ)
    if refusal is not None:
        raise refusal


def check_engine_installed(backend: str) -> None:
    """Raise UserError if vLLM, which makes the rollouts, is not installed, or is built for GPUs and there is none."""
    if why := vllm_unusable() if runs_on_cpu(backend) else vllm_missing():
        raise UserError(
            f"vLLM cannot make the rollouts: {why}",
            where=f"the Python environment {sys.prefix}",
            fix="run `make setup` (requirements/cpu.lock), or `make setup STACK=gpu` on a machine whose GPU torch sees "
            "(its warning says what is wrong); if Ray's GPUs are on other machines, set VERL_PLATFORM=nvidia",
        )


def check_plugin_installed() -> None:
    """Raise UserError if verl would not find QaRL. verl needs an entry point, which only installed packages have."""
    points = importlib.metadata.entry_points(group="verl.plugins")
    if not any(point.value.startswith("qarl.verl") for point in points):
        raise UserError(
            "verl does not find QaRL's plugin",
            where="entry points of group verl.plugins in this Python environment",
            why="QaRL is not installed, or an old folder qarl.egg-info in the working directory is read first",
            fix="pip install -e . (or make setup) in the checkout; delete an old qarl.egg-info",
        )


def check_no_new_trl() -> None:
    """Raise UserError beside a TRL without the class that verl takes from every installed TRL.

    verl 0.9.1 imports it in `apply_monkey_patch` (verl/models/transformers/monkey_patch.py)."""
    trl = importlib.util.find_spec("trl")
    if (
        trl is None
        or trl.origin is None
        or (Path(trl.origin).parent / "experimental" / "ppo").is_dir()
    ):
        return
    if (version := importlib.metadata.version("trl")) >= "1":
        raise UserError(
            f"verl 0.9.1 does not run beside TRL {version}",
            where=f"the Python environment {sys.prefix}",
            why="verl imports AutoModelForCausalLMWithValueHead from TRL if it is installed, and this TRL lacks it",
            fix="uninstall trl, or use one environment for verl and another for TRL",
        )


def check_this_gpu(scheme: Scheme, kernels: KernelChoice) -> None:
    """Raise UserError if the GPU of this process is too old or too new for `scheme` (`check_capability`). Do nothing
    without a GPU."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    check_capability(scheme, kernels, 10 * major + minor)


def check_capability(scheme: Scheme, kernels: KernelChoice, capability: int) -> None:
    """Raise UserError if vLLM would compute another scheme on this GPU, or choose a kernel that the GPU does not run.

    `capability`: times ten. `kernels`: a value of `quant.kernels`."""
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    refusal = scheme.gpu_refusal(capability, kernels, disabled)
    if refusal is not None:
        raise refusal
