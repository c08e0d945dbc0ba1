"""The layout: which part of the package may import which, read from the sources without importing them.

Every import statement counts, those inside functions and under TYPE_CHECKING too: an import put off is an import.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

FILES = sorted((ROOT / "qarl").rglob("*.py"))
MODULES = {path.relative_to(ROOT).as_posix(): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Dotted names of everything that a file under qarl/ imports: `from a.b import c` gives `a.b` and `a.b.c`."""
    return set(_imports(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).parent.parts))


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offenders(part: str, forbidden: tuple[str, ...], *, besides: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Files whose path starts with `part`, those starting with one of `besides` left out, and what they import."""
    found = {
        name: sorted(module for module in imported_modules(path) if within(module, forbidden))
        for name, path in MODULES.items()
        if name.startswith(part) and not name.startswith(besides or ("\0",))
    }
    return {name: modules for name, modules in found.items() if modules}


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = """
import a.b as c
from d import e
def f():
    import vllm._custom_ops
    importlib.import_module("g.h")
if TYPE_CHECKING:
    from . import i
    from ..j import k
"""
    found = set(_imports(ast.parse(source), ("qarl", "quant")))
    assert found == {
        "a.b", "d", "d.e", "vllm._custom_ops", "g.h", "qarl.quant", "qarl.quant.i", "qarl.j", "qarl.j.k",
    }  # fmt: skip


def test_the_places_that_may_import_an_engine_do() -> None:
    """Otherwise the next tests could pass because they look at the wrong files."""
    assert offenders("qarl/rollout/engine.py", ("vllm",))
    assert offenders("qarl/kernels/cpu/vllm_ops.py", ("vllm",))


def test_vllm_is_imported_only_where_it_is_wrapped() -> None:
    names = ("ops", "cuda", "experts", "attention", "rotary")
    kernels = tuple(f"qarl/kernels/vllm_{name}.py" for name in names)
    wrapped = ("qarl/rollout/", *kernels)
    assert offenders("qarl/", ("vllm",), besides=wrapped) == {}


def test_verl_is_imported_only_by_its_backend() -> None:
    backend = ("qarl/verl/plugin/", "qarl/verl/run.py", "qarl/verl/checks.py")
    assert offenders("qarl/", ("verl",), besides=backend) == {}


def test_the_loss_depends_on_torch_alone() -> None:
    """A drop-in: the folder can be copied into another trainer."""
    files = {name: path for name, path in MODULES.items() if name.startswith("qarl/tbpo/")}
    assert files
    for name, path in files.items():
        others = {module for module in imported_modules(path) if not within(module, ("torch", "qarl.tbpo"))}
        # `from a import b` gives `a.b`, whose top level is a module of the standard library or is not.
        assert {module for module in others if module.partition(".")[0] not in sys.stdlib_module_names} == set(), name


UPPER_LAYERS = {
    "qarl/kernels/": ("qarl.quant", "qarl.rollout", "qarl.trainer", "qarl.align", "qarl.tbpo"),
    "qarl/quant/": ("qarl.rollout", "qarl.trainer", "qarl.align", "qarl.tbpo"),
    "qarl/align/": ("qarl.rollout", "qarl.trainer", "qarl.tbpo"),
    "qarl/bench/": ("qarl.rollout", "qarl.trainer", "qarl.align", "qarl.tbpo", "qarl.config"),
    "qarl/bench/cost/": ("qarl.trainer", "qarl.tbpo"),
    "qarl/rollout/": ("qarl.trainer", "qarl.align", "qarl.tbpo"),
    "qarl/config": ("qarl.kernels", "qarl.quant", "qarl.rollout", "qarl.trainer", "qarl.align", "qarl.tbpo"),
    "qarl/checks/memory.py": ("qarl.kernels", "qarl.quant", "qarl.rollout", "qarl.trainer", "qarl.align", "qarl.tbpo"),
    "qarl/": ("qarl.train", "qarl.doctor", "tests", "scripts"),
}


WHOLE_STEPS = "qarl/bench/steps/"
"""The part of the benchmark that times the trainer itself."""
SINGLE_OPERATIONS = "qarl/bench/cost/"
"""The part that times the engine's and the aligned blocks' operations one by one."""


@pytest.mark.parametrize("part", UPPER_LAYERS)
def test_imports_point_down_only(part: str) -> None:
    besides = (WHOLE_STEPS, SINGLE_OPERATIONS) if part == "qarl/bench/" else ()
    assert offenders(part, UPPER_LAYERS[part], besides=besides) == {}


def test_single_files_do_not_reach_into_the_trainer() -> None:
    upper = ("qarl/trainer/", "qarl/train.py", "qarl/diagnose/__main__.py", "qarl/doctor/", WHOLE_STEPS)
    assert offenders("qarl/", ("qarl.trainer",), besides=upper) == {}


def test_nothing_imports_the_benchmark() -> None:
    assert offenders("qarl/", ("qarl.bench",), besides=("qarl/bench/",)) == {}


def test_the_preflight_is_only_for_the_doctor() -> None:
    assert offenders("qarl/", ("qarl.doctor",), besides=("qarl/doctor/", "qarl/doctor/__main__.py")) == {}
    assert offenders("qarl/doctor/", ("qarl.trainer.local", "qarl.trainer.policy", "qarl.tbpo", "verl")) == {}


def test_reading_a_config_needs_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "vllm", "verl", "datasets", "compressed_tensors", "numpy")
    for part in ("qarl/__init__.py", "qarl/config", "qarl/errors.py", "qarl/checks/memory.py"):
        assert offenders(part, heavy) == {}
    assert {"qarl/config/schema.py", "qarl/config/strict_yaml.py"} <= set(MODULES)


def test_sources_stay_short() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > 450} == {}
    assert lines["qarl/train.py"] < 100
    assert lines["qarl/doctor/__main__.py"] < 100


def test_every_module_says_what_it_is() -> None:
    for name, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)) or (path.name == "__init__.py" and not source.strip()), name


def test_every_package_is_packaged() -> None:
    """The list in pyproject.toml is explicit, and a folder missing from it would be missing from the wheel."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in FILES if path.name == "__init__.py"
    }
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(packages | {"qarl.configs"})
    bare = {path.parent for path in FILES if not (path.parent / "__init__.py").is_file()}
    assert bare == set(), "folders with sources and without __init__.py"


def test_the_readme_has_no_figure_left_to_fill_in() -> None:
    assert "@@" not in (ROOT / "README.md").read_text(encoding="utf-8")
