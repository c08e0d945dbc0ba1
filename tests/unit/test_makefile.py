"""Makefile: an environment holds one lock. Two of them would mix two builds of torch and vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT


def make(venv: Path, target: str, *variables: str) -> tuple[int, str]:
    """Return the exit code and what was printed. The packages are never installed: Python is the command `true`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", target, f"VENV={venv}", "PYTHON=true", *variables]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("installed", "target", "asked", "why"),
    [
        (["gpu"], "quickstart", [], "holds the gpu lock; installing the cpu lock over it would mix"),
        (["cpu"], "setup", ["STACK=gpu"], "holds the cpu lock; installing the gpu lock over it would mix"),
        (["cpu", "gpu"], "quickstart", [], "holds both locks"),
        (["cpu", "gpu"], "setup", ["STACK=gpu"], "rm -r "),
    ],
    ids=str,
)
def test_another_lock_is_refused(tmp_path: Path, installed: list[str], target: str, asked: list[str], why: str) -> None:
    for stack in installed:
        (tmp_path / f".installed-{stack}").touch()
    code, printed = make(tmp_path, target, *asked)
    assert code != 0 and why in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".installed-{stack}" for stack in installed]


@pytest.mark.parametrize("stack", ["cpu", "gpu"], ids=["the cpu lock", "the gpu lock"])
def test_its_own_lock_is_taken(tmp_path: Path, stack: str) -> None:
    code, printed = make(tmp_path, "setup", f"STACK={stack}")
    assert code != 0 and "could not be installed" in printed and " lock over it" not in printed
    (tmp_path / f".installed-{stack}").touch()
    assert make(tmp_path, "setup", f"STACK={stack}")[0] == 0
