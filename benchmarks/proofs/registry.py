"""The files of benchmarks/results, what each shows, and the function or the command that makes it (registry.yaml)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.proofs.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results"
REGISTRY = Path(__file__).with_name("registry.yaml")


@dataclass(frozen=True)
class Result:
    """A committed file. `run`: MODULE:FUNCTION of benchmarks.proofs. `date`, `commit`: where the file has none."""

    file: str
    shows: str
    page: str
    command: str
    run: str | None = None
    date: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Proof:
    """A function that makes `file`. `key`: what names a row of a file that lists its rows."""

    name: str
    shows: str
    file: str
    run: str
    key: tuple[str, ...] = ()

    def load(self) -> Callable[..., None]:
        module, _, function = self.run.partition(":")
        found: Callable[..., None] = getattr(importlib.import_module(f"benchmarks.proofs.{module}"), function)
        return found


@cache
def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    return found


@cache
def proofs() -> dict[str, Proof]:
    return {
        name: Proof(name, entry["shows"], entry["file"], entry["run"], tuple(entry.get("key", ())))
        for name, entry in _entries().items()
        if "run" in entry
    }


def results() -> list[Result]:
    """Return every committed file, in the registry's order. An entry may have several, from one command."""
    found = []
    for name, entry in _entries().items():
        command = entry.get("command", f"python -m benchmarks.proofs {name}")
        for file, more in {entry["file"]: {}, **entry.get("also", {})}.items():
            about = {"command": command} | {key: entry.get(key) for key in ("shows", "page", "run", "date", "commit")}
            found.append(Result(file=file, **about | more))
    return found
