"""The layout of the tests: no folder or file shadows a package, and no test imports another."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys

import pytest
from checkout import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("folder", ["tests/support", "scripts", "examples"])
def test_no_file_that_is_found_by_its_folder_has_the_name_of_a_package(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert names & (sys.stdlib_module_names | importlib.metadata.packages_distributions().keys()) == set()


def test_no_test_is_imported() -> None:
    """Tests share by conftest.py and tests/support."""
    for path in FILES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert [name for name in modules if re.match(r"(test_|conftest)", name)] == [], path.name
