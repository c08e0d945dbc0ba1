"""scripts/mutate.py on a package of three lines: what it says of mutants that survive, hang or no longer fit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT

SCRIPTS = str(ROOT / "scripts")

CODE = """
def add(a, b):
    return a + b
def wait(n):
    while n > 0:
        n -= 1
"""
TESTS = """
import subprocess, sys
from thing import code
def test_add():
    assert code.add(2, 3) == 5
def test_in_a_subprocess():
    assert subprocess.run([sys.executable, "-c", "from thing import code; assert code.add(1, 1) == 2"]).returncode == 0
def test_wait():
    code.wait(3)
"""
KILLED = {"id": "sum", "file": "thing/code.py", "old": "a + b", "new": "a - b", "breaks": "sums"}
SURVIVES = {"id": "order", "file": "thing/code.py", "old": "a + b", "new": "b + a", "breaks": "nothing"}
HANGS = {"id": "wait", "file": "thing/code.py", "old": "n -= 1", "new": "n += 1", "breaks": "waits"}


class Tree:
    """A git repository with the package `thing`, its tests, and mutants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in {"thing/__init__.py": "", "thing/code.py": CODE, "tests/test_thing.py": TESTS}.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        (root / "scripts" / "mutants").mkdir(parents=True)
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    def run(self, *mutants: dict[str, Any], options: tuple[str, ...] = (), tests: str = "tests/test_thing.py") -> int:
        import mutate

        content = {"tests": [tests], "mutants": list(mutants)}
        (self.root / "scripts" / "mutants" / "thing.yaml").write_text(yaml.safe_dump(content))
        return mutate.main(options, root=self.root)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.syspath_prepend(SCRIPTS)
    return Tree(tmp_path)


def test_killed_mutants_are_told_with_their_test_and_survivors_once_more(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: mutants of one size within a second, which bytecode would hide, and tests that import in a subprocess."""
    product = KILLED | {"id": "product", "new": "a * b", "tests": ["tests/test_thing.py", "-k", "subprocess"]}
    assert tree.run(KILLED, product, SURVIVES, options=("--jobs", "1")) == 1
    output = capsys.readouterr().out
    assert "green    tests/test_thing.py: 3 passed" in output
    assert re.search("killed   sum .* tests/test_thing.py::test_add", output)
    assert re.search("killed   product .* tests/test_thing.py::test_in_a_subprocess", output)
    assert "survived order" in output.partition("3 mutants, 2 killed")[2] and "thing/code.py: nothing" in output
    assert (tree.root / "thing" / "code.py").read_text() == CODE


def test_an_argued_survivor_is_listed_and_is_no_failure(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    assert tree.run(SURVIVES | {"argued": "sums commute"}) == 0
    assert "(argued: sums commute)" in capsys.readouterr().out


@pytest.mark.slow
def test_only_a_mutant_that_is_marked_may_hang(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    marked, unmarked = HANGS | {"id": "marked", "hangs": True}, HANGS | {"id": "unmarked"}
    assert tree.run(marked, unmarked, options=("--limit", "8", "--jobs", "2")) == 1
    output = capsys.readouterr().out
    assert "killed   marked" in output and "slow     unmarked" in output and "2 mutants, 1 killed" in output


ARGUED = [SURVIVES | {"id": f"order-{i}", "argued": "sums commute"} for i in range(3)]


@pytest.mark.parametrize(
    ("mutants", "options", "words"),
    [
        ([KILLED | {"old": "a * b"}], (), ["stale    sum", "0 times"]),
        ([KILLED | {"old": "n", "id": "twice"}], (), ["stale    twice", "update the mutant"]),
        ([KILLED | {"file": "thing/gone.py"}], (), ["stale    sum"]),
        ([KILLED | {"new": "a + b  # sum"}], (), ["bad      sum: it changes nothing"]),
        ([KILLED | {"new": "a +"}], (), ["bad      sum", "does not parse"]),
        ([KILLED, KILLED], (), ["ids given twice: sum"]),
        ([KILLED | {"argues": "no such key"}], (), ["thing.yaml", "argues"]),
        ([{"id": "sum"}], (), ["thing.yaml", "missing"]),
        (ARGUED, (), ["over 2 mutants have an argument"]),
        ([KILLED], ("--only", "other"), ["no such area or mutant: other"]),
        ([KILLED], ("--area", "other"), ["no such area or mutant: other"]),
        ([KILLED | {"tests": ["tests/test_thing.py", "-k", "nothing"]}], (), ["red", "exit code 5"]),
        ([KILLED], ("--limit", "0.01"), ["not imported from the copy"]),
    ],
)
def test_what_says_nothing_is_exit_code_2(
    tree: Tree, capsys: pytest.CaptureFixture[str], mutants: list, options: tuple[str, ...], words: list[str]
) -> None:
    assert tree.run(*mutants, options=options) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_a_red_baseline_is_an_error_and_no_mutant_runs(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    (tree.root / "tests" / "test_thing.py").write_text(TESTS.replace("== 5", "== 6"))
    assert tree.run(KILLED) == 2
    output = capsys.readouterr()
    assert "red      tests/test_thing.py: exit code 1 without a mutant" in output.err and "killed" not in output.out
    assert tree.run(KILLED, options=("--deselect", "tests/test_thing.py::test_add")) == 0


def test_the_repository_has_mutants_of_every_part(tree: Tree) -> None:
    """Whether each still fits the code is what the tool itself says: a change of code need not wait for its mutants."""
    import mutant_files

    mutants = mutant_files.read_mutants(Path(SCRIPTS) / "mutants")
    assert len(mutants) >= 75
    parts = {mutant.file.split("/")[1] for mutant in mutants if mutant.file.count("/") > 1}
    assert parts >= {"tbpo", "quant", "align", "kernels", "rollout", "trainer", "verl", "doctor"}
    root = Path(SCRIPTS).parent
    assert all((root / name).is_file() for one in mutants for name in one.tests if name.startswith("tests/"))
