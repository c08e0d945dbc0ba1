"""The files of benchmarks/results, what each shows, and the function or the command that makes it (registry.yaml)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
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
    """A committed file. `run`: MODULE:FUNCTION of benchmarks.proofs that makes it. `key`: what names a row of a file
    that lists its rows. `date`, `commit`: where the file has none."""

    name: str
    file: str
    shows: str
    page: str
    command: str
    run: str | None = None
    key: Sequence[str] = ()
    date: str | None = None
    commit: str | None = None

    def load(self) -> Callable[..., None]:
        proof: Callable[..., None] = pkgutil.resolve_name(f"benchmarks.proofs.{self.run}")
        return proof


@cache
def results() -> list[Result]:
    """Return every committed file, in the registry's order. An entry may have several, from one command."""
    proofs = []
    entries: dict[str, dict[str, Any]] = yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    for name, entry in entries.items():
        also = entry.pop("also", {})
        about = {"name": name, "command": f"python -m benchmarks.proofs {name}"} | entry
        proofs.append(Result(**about))
        proofs += [
            Result(**about | {"file": file, "run": None} | more) for file, more in also.items()
        ]
    return proofs


def proofs() -> dict[str, Result]:
    """Return the files that a function makes, by the name of the proof."""
    return {result.name: result for result in results() if result.run}
