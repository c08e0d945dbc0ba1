"""Mutants and the files that hold them, as `mutate.py` explains them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

MOST_ARGUED = 2


class Unusable(Exception):
    """Nothing can be said: the message says why."""


@dataclass(frozen=True)
class Mutant:
    """One replacement in `file`; `tests` are arguments for pytest."""

    id: str
    area: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    hangs: bool = False
    argued: str | None = None

    def source(self, root: Path) -> str:
        """The mutated text of the file. Unusable if the mutant does not fit it."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (found := text.count(self.old)) != 1:
            raise Unusable(f"stale    {self.id}: {self.file} has its old text {found} times; update the mutant")
        mutated = text.replace(self.old, self.new)
        try:
            same = ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text))
        except SyntaxError as error:
            raise Unusable(f"bad      {self.id}: {self.file} does not parse: {error}") from error
        if same:
            raise Unusable(f"bad      {self.id}: it changes nothing")
        return mutated


def read_mutants(folder: Path) -> list[Mutant]:
    """All mutants, by area. Unusable if a file or an entry is not as the module says."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            entries = [{"tests": content["tests"], **entry, "area": path.stem} for entry in content["mutants"]]
            mutants += [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
        except (yaml.YAMLError, TypeError, KeyError) as error:
            raise Unusable(f"{path}: {error}, where a mutant has {[field.name for field in fields(Mutant)]}") from error
    ids = [mutant.id for mutant in mutants]
    if doubled := sorted({one for one in ids if ids.count(one) > 1}):
        raise Unusable(f"ids given twice: {', '.join(doubled)}")
    if sum(mutant.argued is not None for mutant in mutants) > MOST_ARGUED:
        raise Unusable(f"over {MOST_ARGUED} mutants have an argument for surviving: write tests instead")
    return mutants


def select(mutants: list[Mutant], areas: Sequence[str], ids: Sequence[str]) -> list[Mutant]:
    if missing := {*areas} - {one.area for one in mutants} | {*ids} - {one.id for one in mutants}:
        raise Unusable(f"no such area or mutant: {', '.join(sorted(missing))}")
    return [one for one in mutants if not (areas or ids) or one.area in areas or one.id in ids]


def check_fit(mutants: list[Mutant], root: Path) -> None:
    """Unusable, with all of them, if mutants do not fit the code."""
    problems = []
    for mutant in mutants:
        try:
            mutant.source(root)
        except Unusable as error:
            problems.append(str(error))
    if problems:
        raise Unusable("\n".join(problems))
