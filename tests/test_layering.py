"""The layout: which part of the package may import which, read from the sources without importing them.

Every import statement counts, those inside functions and under TYPE_CHECKING too: an import put off is an import.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

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


LAYERS = (
    ("errors", "lazy"),
    ("process", "console", "vllm_versions"),
    ("tbpo",),
    ("config", "kernels"),
    ("data", "objectives", "quant", "optim"),
    ("align", "rollout"),
    ("checkpoint",),
    ("metrics",),
    ("report",),
    ("checks",),
    ("trainer",),
    ("verl", "trl"),
    ("diagnose", "doctor", "bench"),
    ("dry_run",),
    ("train", "export", ""),
    ("demo",),
    ("__main__",),
)
"""Packages and modules of `qarl`, from the bottom up. Each may import what stands in a line above its own; two in one
line know nothing of each other. The empty name is `qarl` itself."""
_RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def part_of(module: str) -> str:
    """`qarl.quant.scheme` is part of quant."""
    return module.split(".")[1] if "." in module else ""


def dotted(name: str) -> str:
    """The module of a file."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def graph() -> dict[str, set[str]]:
    """Modules of the package, and the modules of the package that each imports."""
    names = {dotted(name): path for name, path in MODULES.items()}
    return {name: (imported_modules(path) & names.keys()) - {name} for name, path in names.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, over however many steps."""
    reach = {name: set(targets) for name, targets in edges.items()}
    changed = True
    while changed:
        changed = False
        for name, targets in reach.items():
            further = set().union(*(reach.get(target, set()) for target in targets)) - targets
            if further:
                reach[name], changed = targets | further, True
    groups = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in reach}
    return sorted(sorted(group) for group in groups if group)


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(edges) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_modules_import_each_other() -> None:
    """A package is not its modules: `from qarl.data import x` inside qarl/data would be a circle through it."""
    assert circles(graph()) == []


def test_every_part_has_its_layer() -> None:
    assert {part_of(name) for name in graph()} == set(_RANK)


def test_imports_point_down_only() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in sorted(targets)
        if part_of(name) != part_of(target) and target != "qarl" and _RANK[part_of(target)] >= _RANK[part_of(name)]
    ]
    assert wrong == []


def test_nothing_imports_tests_or_scripts() -> None:
    assert offenders("qarl/", ("tests", "scripts")) == {}


def test_the_places_that_may_import_an_engine_do() -> None:
    """Otherwise the next tests could pass because they look at the wrong files."""
    assert offenders("qarl/rollout/engine.py", ("vllm",))
    assert offenders("qarl/kernels/cpu/vllm_ops.py", ("vllm",))


def test_vllm_is_imported_only_where_it_is_wrapped() -> None:
    assert offenders("qarl/", ("vllm",), besides=("qarl/rollout/", "qarl/kernels/", "qarl/vllm_versions/")) == {}


def test_verl_is_imported_only_by_its_backend() -> None:
    """And by one low module, which calls verl's losses and corrections for both backends, if a config chooses one."""
    assert offenders("qarl/", ("verl",), besides=("qarl/verl/", "qarl/objectives/verl_losses.py")) == {}
    assert offenders("qarl/objectives/verl_losses.py", ("verl",))


def test_trl_is_imported_only_by_its_package() -> None:
    assert offenders("qarl/", ("trl",), besides=("qarl/trl/",)) == {}
    assert offenders("qarl/trl/", ("trl",))


def test_verl_is_not_imported_with_the_modules_of_the_local_backend() -> None:
    tree = ast.parse(MODULES["qarl/objectives/verl_losses.py"].read_text(encoding="utf-8"))
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for node in at_import for name in _imports(node, ("qarl",)) if within(name, ("verl",))]


def test_the_loss_depends_on_torch_alone() -> None:
    """A drop-in: the folder can be copied into another trainer."""
    files = {name: path for name, path in MODULES.items() if name.startswith("qarl/tbpo/")}
    assert files
    for name, path in files.items():
        others = {module for module in imported_modules(path) if not within(module, ("torch", "qarl.tbpo"))}
        # `from a import b` gives `a.b`, whose top level is a module of the standard library or is not.
        assert {module for module in others if module.partition(".")[0] not in sys.stdlib_module_names} == set(), name


def test_the_doctor_loads_no_trainer() -> None:
    assert offenders("qarl/doctor/", ("qarl.trainer.local", "qarl.trainer.policy", "qarl.tbpo", "verl")) == {}


def test_reading_a_config_needs_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "vllm", "verl", "datasets", "compressed_tensors", "numpy")
    for part in ("qarl/__init__.py", "qarl/config", "qarl/errors.py", "qarl/checks/memory.py"):
        assert offenders(part, heavy) == {}
    assert {"qarl/config/schema.py", "qarl/config/strict_yaml.py"} <= set(MODULES)


def test_sources_stay_short() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > 450} == {}
    for name in ("qarl/train.py", "qarl/doctor/__main__.py"):  # their docstrings are the pages that --help prints
        page = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""
        assert lines[name] - len(page.splitlines()) < 95, name


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
