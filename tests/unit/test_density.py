"""A line says one thing: few lines and statements of many tokens, few assignments of several names at once.

The limits are those of model codebases of the field (TRL: 15 heavy lines and 81 heavy statements per 1,000; vLLM's v1:
67 statements; verl: 8 lines, 50 statements). Kernels in Triton are left out, because their arithmetic on pointers has
another form.
"""

from __future__ import annotations

from pathlib import Path

from checkout import ROOT
from density import Density, count

MOST_HEAVY_LINES = 20
MOST_HEAVY_STATEMENTS = 80
MOST_PACKED = 0.02


def product() -> Density:
    """The density of qarl/ without kernels in Triton."""
    triton = ROOT / "qarl/kernels/triton"
    return count(path for path in (ROOT / "qarl").rglob("*.py") if triton not in path.parents)


def test_a_line_says_one_thing() -> None:
    density = product()
    print(density)  # the counts and the worst ten, with pytest -s
    assert density.heavy_lines <= MOST_HEAVY_LINES, str(density)
    assert density.heavy_statements <= MOST_HEAVY_STATEMENTS, str(density)
    assert density.packed_fraction <= MOST_PACKED, str(density)


def test_the_counter(tmp_path: Path) -> None:
    """Counted by hand: 3 tokens, 7 tokens (packed), 5 tokens of a header and 4 of its body."""
    file = tmp_path / "code.py"
    file.write_text('"""Text."""\na = 1\nb, c = 2, 3\nif a == b:\n    return_(a)  # why\n')
    density = count([file])
    assert sorted(part.tokens for part in density.statements) == [3, 4, 5, 7]
    assert sorted(part.tokens for part in density.lines) == [3, 4, 5, 7]
    assert (density.assignments, density.packed) == (2, 1)
