"""The layers of the package: which part may import which, and that no modules import each other in a circle.

The imports are read from the sources, without importing them.

Every import statement counts, those inside functions and under TYPE_CHECKING too: an import put off is an import.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

FILES = sorted((ROOT / "qarl").rglob("*.py"))
MODULES = {path.relative_to(ROOT).as_posix(): path for path in FILES}
MOST_LINES = 450
LAYERS = (
    ("errors", "lazy", "hangup"),
    ("command_line", "progress"),
    ("process", "console", "vllm_versions", "schemes", "families", "plugins"),
    ("tbpo", "turns"),
    ("config", "kernels"),
    ("side_packages",),
    ("data", "objectives", "quant", "optim"),
    ("lora",),
    ("align", "rollout"),
    ("checkpoint",),
    ("metrics",),
    ("report",),
    ("checks",),
    ("step",),
    ("trainer",),
    ("verl", "trl"),
    ("diagnose", "doctor", "bench", "eval", "sources"),
    ("train", "export", "convert_gguf", ""),
    ("demo",),
    ("warm_start", "__main__"),
)
"""Packages and modules of `qarl`, from the bottom up. Each may import what stands in a line above its own; two in one
line know nothing of each other. The empty name is `qarl` itself."""
_RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "transformers", "vllm", "verl", "datasets", "compressed_tensors", "numpy")


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """The imports of a file under qarl/: `from a.b import c` is ("a.b", "c"), and `import a.b` is ("a.b", "")."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "__import__",
        ):
            yield from (
                (str(argument.value), "")
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant)
            )


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Dotted names of everything that a file under qarl/ imports: `from a.b import c` gives `a.b` and `a.b.c`."""
    names: dict[str, None] = {}
    for module, name in imports(path):
        names[module] = None
        if name:
            names[f"{module}.{name}"] = None
    return tuple(names)


def part_of(name: str) -> str:
    """`qarl.quant.linear` and `qarl/quant/linear.py` are part of quant."""
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    return "" if parts[1:] in ([], ["__init__"]) else parts[1]


def importers(package: str, part: str = "qarl/") -> set[str]:
    """The files under `part` that import `package`."""
    return {
        name
        for name, path in MODULES.items()
        if name.startswith(part)
        and any(f"{module}.".startswith(f"{package}.") for module in imported_modules(path))
    }


def test_imports_point_down_only() -> None:
    assert {part_of(name) for name in MODULES} == set(_RANK)
    wrong = [
        f"{name} imports {module}"
        for name, path in MODULES.items()
        for module in imported_modules(path)
        if module.startswith("qarl.")
        and part_of(module) in _RANK
        and part_of(module) != part_of(name)
        if _RANK[part_of(module)] >= _RANK[part_of(name)]
    ]
    assert wrong == []


def module_of(name: str) -> str:
    """`qarl/quant/scheme.py` is the module qarl.quant.scheme, and `qarl/quant/__init__.py` is qarl.quant."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circles(arrows: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Return the sets of modules that reach each other. `arrows`: of each module, the modules that it imports."""
    reached = {module: set(names) for module, names in arrows.items()}
    for middle in arrows:
        for names in reached.values():
            if middle in names:
                names |= reached[middle]
    together = {
        frozenset(other for other in names if module in reached[other])
        for module, names in reached.items()
        if module in names
    }
    return sorted(together, key=sorted)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Inside packages, too. `from a import b` imports the module a.b if there is one, and otherwise a. That importing
    a.b also runs a's __init__ does not count."""
    paths = {module_of(name): path for name, path in MODULES.items()}
    arrows: dict[str, set[str]] = {}
    for module, path in paths.items():
        whole = {
            f"{base}.{name}" if f"{base}.{name}" in paths else base for base, name in imports(path)
        }
        arrows[module] = whole & set(paths) - {module}
    assert circles(arrows) == []


def test_a_circle_is_found() -> None:
    text = "ab bc ca da de ee fg gf"
    arrows: dict[str, set[str]] = {module: set() for module in "abcdefg"}
    for module, imported in text.split():
        arrows[module].add(imported)
    assert circles(arrows) == [frozenset("abc"), frozenset("e"), frozenset("fg")]


def test_what_every_publish_needs_knows_nothing_of_what_travels() -> None:
    assert importers("qarl.rollout.publish", "qarl/rollout/remote/")
    assert importers("qarl.rollout.remote", "qarl/rollout/publish/") == set()


WRAPPED = {
    "vllm": ("qarl/rollout/", "qarl/kernels/", "qarl/vllm_versions.py"),
    "verl": ("qarl/verl/", "qarl/objectives/"),
    "trl": ("qarl/trl/",),
    "lm_eval": ("qarl/eval/harness.py",),
}


@pytest.mark.parametrize("package", [*WRAPPED, "tests", "scripts", "benchmarks"])
def test_a_package_is_imported_only_where_it_is_wrapped(package: str) -> None:
    files, folders = importers(package), WRAPPED.get(package, ())
    assert bool(files) == bool(folders) and not [
        name for name in files if not name.startswith(folders)
    ]


def test_the_loss_depends_on_torch_alone() -> None:
    """A drop-in: the folder can be copied into another trainer."""
    files = [path for name, path in MODULES.items() if name.startswith("qarl/tbpo/")]
    modules = {
        module
        for path in files
        for module in imported_modules(path)
        if not module.startswith("qarl.tbpo")
    }
    assert files and {module.partition(".")[0] for module in modules} - sys.stdlib_module_names == {
        "torch"
    }


def test_reading_a_config_needs_nothing_heavy() -> None:
    for part in (
        "qarl/__init__.py",
        "qarl/config/",
        "qarl/errors.py",
        "qarl/families/",
        "qarl/checks/memory.py",
    ):
        assert not set().union(*(importers(package, part) for package in HEAVY))
    for package in set(HEAVY) - {"compressed_tensors"}:  # imported inside functions
        assert not importers(package, "qarl/schemes/")


def test_sources_stay_short() -> None:
    folders = ("qarl", "scripts", "benchmarks", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_package_is_packaged() -> None:
    """The list in pyproject.toml is explicit, and a folder missing from it would be missing from the wheel."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in FILES}
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(
        packages | {"qarl.configs", "qarl.examples", "qarl.requirements"}
    )
