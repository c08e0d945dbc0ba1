"""Levels are ordered, show their names, and are asked for properties: no other code knows which one it has."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Iterator

import pytest
from checkout import ROOT
from pydantic import ValidationError

from qarl.config.level import Level
from qarl.config.quant import QuantConfig
from qarl.config.read_config import dump

NAMES = ["off", "linears", "model", "exact"]


def test_levels_are_in_order_and_compare_only_with_levels() -> None:
    assert list(Level) == NAMES
    assert sorted({*NAMES}, key=Level) == NAMES
    assert Level.OFF < Level.LINEARS <= Level.MODEL < Level.EXACT == max(Level)
    assert [level.low_bit for level in Level] == [False, True, True, True]
    assert [level.follows_engine for level in Level] == [False, False, True, True]
    assert [level.zero_mismatch for level in Level] == [False, False, False, True]
    for compare in (Level.MODEL.__lt__, Level.MODEL.__ge__, lambda name: name > Level.MODEL):
        with pytest.raises(TypeError, match="only with a Level"):
            compare("off")


@pytest.mark.parametrize("name", NAMES)
def test_a_level_is_read_and_written_as_its_name(name: str) -> None:
    config = QuantConfig(align=name)
    assert isinstance(config.align, Level) and config.align is QuantConfig(align=Level(name)).align
    assert type(config.model_dump()["align"]) is str and config.model_dump()["align"] == name
    assert f"align: {name}\n" in dump(config.model_dump())
    assert json.loads(json.dumps(config.align)) == f"{config.align}" == str(config.align) == name
    assert pickle.loads(pickle.dumps(config.align)) is config.align


def test_an_unknown_level_is_refused_with_the_names() -> None:
    with pytest.raises(ValidationError, match="'off', 'linears', 'model' or 'exact'"):
        QuantConfig(align="full")


HOME = "qarl/config/level.py"
OF_A_LEVEL = re.compile(r"\b(align|level|limit_level|asked|applied)\b")


def _names_of(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value in NAMES:
            yield str(part.value)


def level_names(source: str) -> list[str]:
    """Lines of a module that name a level where it could ask for a property."""
    found = []
    for node in ast.walk(ast.parse(source)):
        literal = isinstance(node, ast.Constant) and node.value in ("linears", "exact")
        compared = isinstance(node, ast.Compare) and any(_names_of(node))
        if literal or (compared and OF_A_LEVEL.search(ast.unparse(node))):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_the_rule_sees_comparisons_and_keys() -> None:
    assert level_names("if config.quant.align != 'off': pass")
    assert level_names("aligned = level in ('model', 'head')")
    assert level_names("limits = {'linears': 1}")
    assert not level_names("if head_dtype == 'model' or replay == 'off': pass")


def test_code_asks_a_level_for_its_properties() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "qarl").rglob("*.py")}
    found = {
        name: lines
        for name, path in files.items()
        if name != HOME and (lines := level_names(path.read_text(encoding="utf-8")))
    }
    assert found == {}
