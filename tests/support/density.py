"""Counts how much a line and a statement of Python say, in tokens.

A token is a name, an operator, a number or a string. Docstrings and attribute docstrings count as none. The tokens of
a compound statement (if, for, def, class) are those of its header, up to the first statement of its body.
"""

from __future__ import annotations

import ast
import bisect
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HEAVY = 25
"""A line or a statement with this number of tokens is heavy."""
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True, order=True)
class Counted:
    """The tokens of one line or statement, and where it begins."""

    tokens: int
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens: {self.file}:{self.line}"


@dataclass
class Density:
    """What was counted. `packed` of `assignments` set several names from a tuple of values."""

    lines: list[Counted]
    statements: list[Counted]
    assignments: int = 0
    packed: int = 0

    @property
    def heavy_lines(self) -> float:
        """Heavy lines per 1,000."""
        return _per_thousand(self.lines)

    @property
    def heavy_statements(self) -> float:
        """Heavy statements per 1,000."""
        return _per_thousand(self.statements)

    @property
    def packed_fraction(self) -> float:
        return self.packed / self.assignments

    def __str__(self) -> str:
        shown = [
            f"{self.heavy_lines:.1f} heavy lines per 1,000, {self.heavy_statements:.1f} heavy statements, "
            f"{self.packed_fraction:.1%} of assignments packed; the longest:",
            *map(str, sorted(self.statements, reverse=True)[:10]),
        ]
        return "\n".join(shown)


def _per_thousand(counted: list[Counted]) -> float:
    heavy = sum(part.tokens >= HEAVY for part in counted)
    return 1000 * heavy / len(counted)


def count(files: Iterable[Path]) -> Density:
    """Return the density of `files`."""
    density = Density([], [])
    for file in files:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        positions = list(_tokens(source, tree))
        per_line = Counter(line for line, _ in positions)
        density.lines += [Counted(number, str(file), line) for line, number in per_line.items()]
        for node in ast.walk(tree):
            if not isinstance(node, ast.stmt) or _is_text(node):
                continue
            start, end = _header(node)
            number = bisect.bisect_left(positions, end) - bisect.bisect_left(positions, start)
            density.statements.append(Counted(number, str(file), node.lineno))
            density.assignments += isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
            density.packed += _is_packed(node)
    return density


def _tokens(source: str, tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield line and column of each token that counts."""
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_text(node)]
    starts = {(node.lineno, node.col_offset) for node in texts}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.start not in starts:
            yield token.start


def _header(node: ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the statement begins, and where its header ends."""
    decorators = getattr(node, "decorator_list", [])
    start = (decorators[0].lineno, 0) if decorators else (node.lineno, node.col_offset)
    body = getattr(node, "body", None)
    if isinstance(node, ast.Match):
        return start, (node.cases[0].pattern.lineno, 0)
    if not body:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return start, (node.end_lineno, node.end_col_offset)
    first = body[0]
    inner = getattr(first, "decorator_list", [])
    end = (inner[0].lineno, 0) if inner else (first.lineno, first.col_offset)
    return start, end


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_packed(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)
