"""Compiles every kernel configuration without a GPU, and reads registers, stack and shared memory for each target.

Every kernel file has a module variable `AOT: list[AotKernel]` with the types and the configurations its wrappers
launch. `compile_kernel` lowers one of them with the assembler inside Triton's wheel, down to the machine code of a GPU
that need not exist, so a configuration that spills or does not fit is found before a GPU is at hand.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import qarl.kernels.triton

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory one block may use, by target: compute capability 8.0, 9.0 and 10.0 (CUDA C++ Programming
Guide, technical specifications per compute capability)."""


@dataclass(frozen=True)
class AotConfig:
    """One configuration a wrapper launches."""

    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = (80, 90, 100)


@dataclass(frozen=True)
class AotKernel:
    """One kernel with one set of argument types.

    `signature`: argument -> "*bf16", "*i32", "i32", "fp32", ...; those in a configuration's `constexprs` are left out.
    Pointers are taken to be 16-byte aligned, and so are the integers in `divisible`; an integer of 1 is a constexpr,
    as Triton makes it one at a launch.
    """

    kernel: Any
    signature: Mapping[str, str]
    configs: tuple[AotConfig, ...]
    divisible: tuple[str, ...] = field(default=())


class Resources(NamedTuple):
    """Resources of one compiled configuration. Spilled registers live on the stack; no `stack_bytes`, no spills."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_core: str | None


def listed_kernels() -> Iterator[tuple[str, AotKernel]]:
    """(module, entry) for all `AOT` lists of the package."""
    for module in pkgutil.iter_modules(qarl.kernels.triton.__path__):
        entries = getattr(importlib.import_module(f"qarl.kernels.triton.{module.name}"), "AOT", [])
        yield from ((module.name, entry) for entry in entries)


def label(entry: AotKernel, config: AotConfig) -> str:
    """A name for one entry and configuration: kernel, types of its pointers, constexprs, warps and stages."""
    pointers = ",".join(kind for name, kind in entry.signature.items() if kind.startswith("*"))
    constants = ",".join(f"{name}={value}" for name, value in config.constexprs.items())
    return f"{entry.kernel.__name__}[{pointers}][{constants}] warps={config.num_warps} stages={config.num_stages}"


def compile_kernel(entry: AotKernel, config: AotConfig, target: int) -> Resources:
    """Compiles for compute capability `target` (80, 90, 100). Raises what Triton or ptxas raise."""
    names = entry.kernel.arg_names
    types = {name: "constexpr" if name in config.constexprs else entry.signature[name] for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or (name in entry.divisible and types[name] != "constexpr")
    }
    source = ASTSource(entry.kernel, types, constexprs=dict(config.constexprs), attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(
        usage["REG"],
        usage["STACK"] + usage["LOCAL"],
        compiled.metadata.shared + usage["SHARED"],
        next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in compiled.asm["ptx"]), None),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in report.splitlines() if "REG:" in line)
    pairs = (word.split(":") for word in line.split())
    return {key: int(value) for key, value in pairs if "[" not in key}
