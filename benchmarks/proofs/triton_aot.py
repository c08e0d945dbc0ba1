"""Every Triton kernel, compiled for GPUs that need not be here: registers, spills and shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection
from typing import Any

os.environ.pop(
    "TRITON_INTERPRET", None
)  # read where kernels are defined: interpreted functions do not compile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from benchmarks.proofs.harness import Record, Row
from benchmarks.proofs.triton_kernels import KERNELS, AotConfig, AotKernel


def triton_aot(record: Record, *, targets: tuple[int, ...] = (80, 90, 100, 120)) -> None:
    """Compile each configuration that a wrapper launches; none may spill registers. `error`: what the compiler said."""
    for target in targets:
        if record.wants(name := f"sm_{target}"):
            rows = resources(target)
            record.add(
                name, {"resources": rows}, ok=not any("error" in row for row in rows.values())
            )


def configurations(target: int) -> dict[str, tuple[AotKernel, AotConfig]]:
    """Return what is compiled for compute capability `target`, by label."""
    found: dict[str, tuple[AotKernel, AotConfig]] = {}
    for entry in KERNELS:
        for config in entry.configs:
            if target in config.targets:
                name = label(entry, config)
                assert name not in found, f"{name} is listed twice"
                found[name] = (entry, config)
    return found


def first_and_last(target: int) -> list[str]:
    """Return the labels of the first and the last configuration of each kernel."""
    names: dict[str, list[str]] = {}
    for name, (entry, _) in configurations(target).items():
        names.setdefault(full_name(entry), []).append(name)
    return sorted({name for labels in names.values() for name in (labels[0], labels[-1])})


def resources(target: int, names: Collection[str] | None = None) -> dict[str, Row]:
    """Compile for compute capability `target`. `names`: labels of configurations; None: all of them."""
    rows: dict[str, Row] = {}
    for name, (entry, config) in configurations(target).items():
        if names is not None and name not in names:
            continue
        try:
            rows[name] = compile_kernel(entry, config, target)
        except Exception as error:  # Triton and its assembler raise many types
            rows[name] = {"error": f"{type(error).__name__}: {error}"}
    return rows


def kernel_names() -> list[str]:
    return sorted({full_name(entry) for entry in KERNELS})


def full_name(entry: AotKernel) -> str:
    """Return `module.kernel`."""
    return f"{entry.kernel.__module__.rpartition('.')[2]}.{entry.kernel.__name__}"


def label(entry: AotKernel, config: AotConfig) -> str:
    """Return a name for one configuration: kernel, types of its pointers, constexprs, warps and stages."""
    types = (kind for name, kind in entry.signature.items() if name not in config.constexprs)
    pointers = ",".join(kind for kind in types if kind.startswith("*"))
    constants = ",".join(f"{name}={value}" for name, value in config.constexprs.items())
    return f"{full_name(entry)}[{pointers}][{constants}] warps={config.num_warps} stages={config.num_stages}"


def compiled(entry: AotKernel, config: AotConfig, target: int) -> Any:
    """Compile for compute capability `target` (80, 90, 100, 120). Raise what Triton or ptxas raise."""
    names = entry.kernel.arg_names
    types = {
        name: "constexpr" if name in config.constexprs else entry.signature[name] for name in names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or (name in entry.divisible and types[name] != "constexpr")
    }
    source = ASTSource(entry.kernel, types, constexprs=dict(config.constexprs), attrs=attributes)
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def sum_layout(entry: AotKernel, config: AotConfig, target: int) -> list[str]:
    """Return how a kernel's sums are spread over threads: the types of their operands, with the layouts written out.

    Two kernels with the same layouts add in the same order."""
    text = compiled(entry, config, target).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\S+<.*>)$", text, re.MULTILINE))
    types = re.findall(r"^ *\}\) : \((tensor<.*>)\) ->", text, re.MULTILINE)
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), kind) for kind in types]


def compile_kernel(entry: AotKernel, config: AotConfig, target: int) -> Row:
    """Compile for compute capability `target`, and return what the kernel needs.

    `spill_bytes`: registers that are stored to the stack. A stack alone is no spill: the assembler for Blackwell
    reserves 8 bytes for a kernel with TMA.
    """
    kernel = compiled(entry, config, target)
    ptx = kernel.asm["ptx"]
    line = _tool(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], kernel.asm["cubin"], ".cubin"
    )
    usage = {
        key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", line)
    }
    spilled = 0
    if usage["STACK"] + usage["LOCAL"]:
        arch = f"--gpu-name={sm_arch_from_capability(target)}"
        report = _tool([get_ptxas(target).path, "-v", arch, "-o", os.devnull], ptx.encode(), ".ptx")
        spilled = sum(int(stored) for stored in re.findall(r"(\d+) bytes spill stores", report))
    return {
        "registers": usage["REG"],
        "spill_bytes": spilled,
        "shared_bytes": kernel.metadata.shared + usage["SHARED"],
        "tensor_core": next(
            (name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), None
        ),
    }


def _tool(command: list[str], content: bytes, suffix: str) -> str:
    """Return what a tool of CUDA says of a file with `content`."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        run = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
        return run.stdout + run.stderr
