"""Compiles every Triton kernel for GPUs that need not be here: python scripts/triton_aot.py [--targets 80 90 100].

Prints one JSON object, {target: {kernel and configuration: resources}}, and with --output writes it to a file, from
which benchmarks/results/triton_aot.json is made. An `error` in place of resources is what the compiler said.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read where kernels are defined: interpreted functions do not compile

import triton

from qarl.kernels.triton._aot import compile_kernel, label, listed_kernels


def resources(target: int) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for module, entry in listed_kernels():
        for config in entry.configs:
            if target not in config.targets:
                continue
            name = f"{module}.{label(entry, config)}"
            assert name not in found, f"{name} is listed twice"
            try:
                found[name] = dict(compile_kernel(entry, config, target)._asdict())
            except Exception as error:  # Triton and its assembler raise many types
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = {
        "triton": triton.__version__,
        "kernels": sorted({f"{module}.{entry.kernel.__name__}" for module, entry in listed_kernels()}),
        "targets": {f"sm_{target}": resources(target) for target in arguments.targets},
    }
    text = json.dumps(report, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
