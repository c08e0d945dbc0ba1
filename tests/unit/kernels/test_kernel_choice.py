"""quant.kernels as an object: its answers, and that no other code asks which value it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checkout import ROOT

from qarl.schemes.kernel_choice import KernelChoice

HOME = ROOT / "qarl" / "schemes" / "kernel_choice.py"


def comparisons(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the comparisons with a value of quant.kernels, as a text or as a member."""
    values = {choice.value for choice in KernelChoice}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                text = ast.unparse(operand)
                is_member = text.startswith("KernelChoice.")
                is_text = isinstance(operand, ast.Constant) and operand.value in values
                if is_member or is_text:
                    yield node.lineno, text


def test_no_code_asks_which_choice_it_has() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted((ROOT / "qarl").rglob("*.py"))
        if path != HOME
        for line, text in comparisons(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_the_search_finds_what_it_should() -> None:
    source = 'if kernels == "engine" or kernels is KernelChoice.QARL or name == "tbpo":\n    pass'
    assert [text for _, text in comparisons(ast.parse(source))] == [
        "'engine'",
        "KernelChoice.QARL",
    ]


def test_the_answers() -> None:
    answers = {
        choice.value: (choice.by_engine, choice.own_low_bit, choice.dequantizes)
        for choice in KernelChoice
    }
    assert answers == {
        "engine": (True, False, False),
        "qarl": (False, True, False),
        "machete": (False, True, False),
        "dequantized": (False, False, True),
    }
