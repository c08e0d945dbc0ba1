"""The layout of the tests: they mirror the package, share by conftest files and tests/support, shadow nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
BESIDES = {"e2e", "gpu", "gpu_stack", "scripts", "support", "trl_backend", "verl_backend"}
"""Folders that no package of qarl has: whole runs, what needs a GPU or its packages, scripts/, what tests share, and
qarl/verl, whose name is that of verl itself."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_folders_are_those_of_the_package() -> None:
    found = {path.relative_to(TESTS).parts[0] for path in FILES if path.parent != TESTS}
    packages = {path.parent.name for path in (ROOT / "qarl").glob("*/__init__.py")}
    assert found - BESIDES <= packages and found >= BESIDES and "verl" in packages


def test_no_folder_has_the_name_of_a_package_that_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    used = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in wanted}
    assert {"torch", "verl", "vllm"} <= used
    assert {path.parent.name for path in FILES} & used == set()


@pytest.mark.parametrize("folder", ["tests/support", "scripts", "examples"])
def test_no_file_that_is_found_by_its_folder_has_the_name_of_a_package(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert names & (sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()) == set()


def test_no_test_is_imported_and_fixtures_are_asked_for_by_name() -> None:
    found = {path.relative_to(ROOT).as_posix(): set(imported(path)) for path in FILES}
    assert {
        name: modules for name, modules in found.items() if any(re.match(r"(test_|conftest)", one) for one in modules)
    } == {}
    support = [path.name for path in (TESTS / "support").glob("*.py") if "pytest.fixture" in path.read_text()]
    assert support == [], "fixtures belong into a conftest.py"


def test_only_one_file_counts_the_folders_up_to_the_checkout() -> None:
    counting = [path.name for path in FILES if re.search(r"__file__\)(\.resolve\(\))?\.parent", path.read_text())]
    assert counting == ["checkout.py"]


def test_paths_of_tests_in_other_files_are_right() -> None:
    others = [ROOT / "Makefile", ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    others += [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.toml")]
    named = {(path.name, name) for path in others for name in re.findall(r"\btests/[\w/]+(?:\.py)?", path.read_text())}
    assert len(named) > 20
    assert {(file, name) for file, name in named if not (ROOT / name).exists()} == set()
