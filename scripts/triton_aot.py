"""Compiles every Triton kernel for GPUs that need not be here: python scripts/triton_aot.py [--targets 80 90 100 120].

Prints one JSON object, {target: {kernel and configuration: resources}}, and with --output writes it to a file, from
which benchmarks/results/triton_aot.json is made. An `error` in place of resources is what the compiler said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read where kernels are defined: interpreted functions do not compile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton_kernels import KERNELS, AotConfig, AotKernel


class Resources(NamedTuple):
    """Resources of one compiled configuration. `spill_bytes`: registers that are stored to the stack.

    A stack alone is no spill: the assembler for Blackwell reserves 8 bytes for a kernel with TMA.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core: str | None


def resources(target: int) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for entry in KERNELS:
        for config in entry.configs:
            if target not in config.targets:
                continue
            name = label(entry, config)
            assert name not in found, f"{name} is listed twice"
            try:
                found[name] = dict(compile_kernel(entry, config, target)._asdict())
            except Exception as error:  # Triton and its assembler raise many types
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def full_name(entry: AotKernel) -> str:
    """`module.kernel`."""
    return f"{entry.kernel.__module__.rpartition('.')[2]}.{entry.kernel.__name__}"


def label(entry: AotKernel, config: AotConfig) -> str:
    """A name for one entry and configuration: kernel, types of its pointers, constexprs, warps and stages."""
    pointers = ",".join(kind for name, kind in entry.signature.items() if kind.startswith("*"))
    constants = ",".join(f"{name}={value}" for name, value in config.constexprs.items())
    return f"{full_name(entry)}[{pointers}][{constants}] warps={config.num_warps} stages={config.num_stages}"


def compile_kernel(entry: AotKernel, config: AotConfig, target: int) -> Resources:
    """Compiles for compute capability `target` (80, 90, 100, 120). Raises what Triton or ptxas raise."""
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
        _spill_bytes(compiled.asm["ptx"], target) if usage["STACK"] + usage["LOCAL"] else 0,
        compiled.metadata.shared + usage["SHARED"],
        next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in compiled.asm["ptx"]), None),
    )


def _spill_bytes(ptx: str, target: int) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"--gpu-name={sm_arch_from_capability(target)}"
        command = [get_ptxas(target).path, "-v", arch, file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(stored) for stored in re.findall(r"(\d+) bytes spill stores", report))


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in report.splitlines() if "REG:" in line)
    pairs = (word.split(":") for word in line.split())
    return {key: int(value) for key, value in pairs if "[" not in key}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100, 120])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = {
        "triton": triton.__version__,
        "kernels": sorted({full_name(entry) for entry in KERNELS}),
        "targets": {f"sm_{target}": resources(target) for target in arguments.targets},
    }
    text = json.dumps(report, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
