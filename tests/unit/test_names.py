"""Names are nouns: a participle or a pronoun says nothing about what it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from checkout import ROOT

NO_NOUNS = {"made", "mine", "kept", "said", "served", "theirs", "wanted"}
FOLDERS = ("qarl", "scripts", "benchmarks", "examples")


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that the code gives to something, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_nouns(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in (ROOT / folder).rglob("*.py")
        for name, line in names(ast.parse(path.read_text(encoding="utf-8")))
        if name.strip("_") in NO_NOUNS
    ]
    assert wrong == []


def test_the_finder() -> None:
    code = "def said(made):\n    self.kept = served = 1\nremade = [wanted for theirs in remade]\n"
    found = [name for name, _ in names(ast.parse(code)) if name in NO_NOUNS]
    assert sorted(found) == ["kept", "made", "said", "served", "theirs"], "wanted is only read"
