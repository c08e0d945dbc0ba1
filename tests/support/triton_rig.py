"""How Triton kernels are tested: under its interpreter, on a GPU, and compiled for GPUs that are not here.

The tests in tests/integration/kernels/triton_kernels/ run one file at a time under the interpreter, each in a separate
process (`run_interpreted`), because TRITON_INTERPRET acts when a kernel is defined. By hand: `TRITON_INTERPRET=1 python
-m pytest tests/integration/kernels/triton_kernels/test_quantize.py`. On a machine with a GPU pytest also collects them
as they are, and the same tests run compiled on `DEVICE`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from typing import Any

from checkout import ROOT

KERNEL_TESTS = sorted(
    (ROOT / "tests" / "integration" / "kernels" / "triton_kernels").glob("test_*.py")
)
SOURCES = sorted((ROOT / "qarl" / "kernels" / "triton").glob("*.py"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory one block may use, by target: compute capability 8.0, 9.0, 10.0 and 12.0 (CUDA C++ Programming
Guide, technical specifications per compute capability)."""


def run_interpreted(marks: str) -> subprocess.CompletedProcess[str]:
    """Run the tests that `marks` selects, in one process: it takes longer to start than the tests of a file do."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        *map(str, KERNEL_TESTS),
    ]
    return _run(command, {"TRITON_INTERPRET": "1"})


def compile_for(target: int, *, whole: bool = True) -> dict[str, Any]:
    """What benchmarks/proofs/triton_aot.py finds for one compute capability: the kernels' names, the labels of all
    configurations, and resources. `whole`: of all configurations; otherwise of the first and last of each kernel."""
    names = "None" if whole else f"triton_aot.first_and_last({target})"
    program = (
        "import json; from benchmarks.proofs import triton_aot; "
        f"found = triton_aot.kernel_names(), list(triton_aot.configurations({target})), "
        f"triton_aot.resources({target}, {names}); print(json.dumps(found))"
    )
    run = _run([sys.executable, "-c", program], {})
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip(("kernels", "labels", "resources"), json.loads(run.stdout), strict=True))


def sum_layouts(kernel: str, target: int, constants: str) -> list[list[str]]:
    """How the sums of each configuration of a kernel with `constants` in its label are spread over threads."""
    program = (
        "import json; from benchmarks.proofs import triton_aot; "
        f"found = [triton_aot.sum_layout(*value, {target}) "
        f"for label, value in triton_aot.configurations({target}).items() "
        f"if label.startswith({kernel!r} + '[') and {constants!r} in label]; print(json.dumps(found))"
    )
    run = _run([sys.executable, "-c", program], {})
    assert run.returncode == 0, run.stderr[-3000:]
    layouts: list[list[str]] = json.loads(run.stdout)
    return layouts


def entry_kernels() -> set[str]:
    """Every `@triton.jit` function that no other one calls, as module.function, read from the sources of the package.

    Files with a leading underscore hold what kernels share and are not launched.
    """
    functions: dict[str, str] = {}
    called: set[str] = set()
    for path in (path for path in SOURCES if not path.stem.startswith("_")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                functions[node.name] = f"{path.stem}.{node.name}"
                calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
                called |= {
                    func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
                    for func in calls
                }
    return {full for name, full in functions.items() if name not in called}


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    inherited.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=inherited | environment
    )
