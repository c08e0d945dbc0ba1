"""Outside of qarl/schemes no code asks which scheme it has: neither by name, nor by class, nor by identity."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from checkout import ROOT

from qarl.schemes import UNQUANTIZED, scheme_names

FILES = [path for path in sorted((ROOT / "qarl").rglob("*.py")) if path.parent.name != "schemes"]
SHARED = ("base", "registry", "kernel_choice", "checkpoint_config", "plan_terms")
"""Modules of qarl/schemes that are about all schemes."""
OTHER_MEANINGS = {
    # rates of a data sheet
    "qarl/bench/plan/devices.py": ("fp8",),
    "qarl/kernels/cuda/vllm_linears.py": ("fp8",),
    "qarl/kernels/triton/linears.py": ("fp8",),
    # vLLM's name for a kind of kernels
    "qarl/rollout/vllm_plugin/own_linears.py": ("fp8",),
    "qarl/rollout/vllm_plugin/cuda_linears.py": ("fp8",),
    # rows of tiles.json, by the product that is tuned
    "qarl/kernels/triton/scaled_mm.py": ("w8a8", "fp8"),
    "qarl/kernels/triton/w4a16.py": ("w4a16",),
    "qarl/kernels/triton/w4a16_forward.py": ("w4a16",),
}
"""Files in which the name of a scheme means something else. `bf16` is a dtype everywhere."""


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines and the names of quantized schemes that are string literals."""
    names = set(scheme_names()) - {UNQUANTIZED.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            yield node.lineno, node.value


def classes_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the imports of one scheme's module."""
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        package, _, leaf = module.rpartition(".")
        if package == "qarl.schemes" and leaf not in SHARED:
            yield node.lineno, module


def comparisons_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the comparisons with a name of the unquantized scheme, or with the scheme itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [ast.unparse(operand) for operand in (node.left, *node.comparators)]
            texts = [text for text in operands if "UNQUANTIZED" in text]
            about_scheme = any("scheme" in text for text in operands)
            texts += [text for text in operands if text == repr(UNQUANTIZED.name) and about_scheme]
            yield from ((node.lineno, text) for text in texts)


def found(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = OTHER_MEANINGS.get(name, ())
    hits = [*names_in(tree), *classes_in(tree), *comparisons_in(tree)]
    return [f"{name}:{line} {text}" for line, text in hits if text not in allowed]


def test_no_code_asks_which_scheme_it_has() -> None:
    assert [hit for path in FILES for hit in found(path)] == []


def test_the_search_finds_what_it_should() -> None:
    source = """
from qarl.schemes.fp8 import FP8
if scheme == "w8a8" or scheme is UNQUANTIZED or scheme.name == "bf16" or dtype == "bf16":
    kernels = {"w4a16": 1}
"""
    tree = ast.parse(source)
    assert [text for _, text in names_in(tree)] == ["w8a8", "w4a16"]
    assert [text for _, text in classes_in(tree)] == ["qarl.schemes.fp8"]
    assert [text for _, text in comparisons_in(tree)] == ["UNQUANTIZED", "'bf16'"]
