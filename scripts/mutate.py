"""Mutation tests: each mutant is one realistic fault in a copy of the tree, and the tests of its area must notice it.

    python scripts/mutate.py                        all areas; takes about an hour on two cores
    python scripts/mutate.py --area tbpo quant      some areas
    python scripts/mutate.py --only ID ...          some mutants
    python scripts/mutate.py --list                 what there is; nothing runs

Mutants are in scripts/mutants/AREA.yaml:

    tests: [tests/test_tbpo.py]     arguments for pytest; green without mutants, and done within the limit
    mutants:
      - id: tbpo-cap-one-sided
        file: qarl/tbpo/loss.py
        old: mismatch.clamp(1 / cap, cap)       stands in the file exactly once
        new: mismatch.clamp(max=cap)
        breaks: what goes wrong, and for whom
        tests: [...]    optional, in place of the area's
        hangs: true     optional: running into the limit is how it is noticed
        argued: reason  optional: why it may survive; at most two mutants may

The checkout is never edited: each job has its own copy, first on PYTHONPATH, so that subprocesses import the mutant too.
What PYTHONPATH holds already stays behind it. Unmutated tests run first. Exit codes: 0; 1 where a mutant that is not
argued survived or was too slow to tell; 2 where nothing can be said: a mutant whose `old` is not in its file once
(the code has changed: update the mutant), tests that fail without a mutant, or a bad file of mutants.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60.0
MOST_ARGUED = 2
# Folders that git ignores and tests read.
SHARED = ("models", "data")


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
        """The mutated text of the file. Unusable where the mutant does not fit it."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise Unusable(f"stale    {self.id}: {self.file} has its old text {found} times; update the mutant")
        mutated = text.replace(self.old, self.new)
        try:
            if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text)):
                raise Unusable(f"bad      {self.id}: it changes nothing")
        except SyntaxError as error:
            raise Unusable(f"bad      {self.id}: {self.file} does not parse: {error}") from error
        return mutated


@dataclass(frozen=True)
class Outcome:
    """`status` is killed, survived or slow; `by` is the first test that failed."""

    mutant: Mutant
    status: str
    seconds: float
    by: str

    @property
    def counts(self) -> bool:
        return self.status != "killed" and self.mutant.argued is None

    def __str__(self) -> str:
        what = self.by if self.status == "killed" else f"{self.mutant.file}: {self.mutant.breaks}"
        argued = f" (argued: {self.mutant.argued})" if self.mutant.argued else ""
        return f"{self.status:8} {self.mutant.id:40} {self.seconds:5.1f} s  {what}{argued}"


def read_mutants(folder: Path) -> list[Mutant]:
    """All mutants, by area. Unusable where a file or an entry is not as the module says."""
    known = {field.name for field in fields(Mutant)} - {"area"}
    mutants: list[Mutant] = []
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for entry in content["mutants"]:
            if unknown := entry.keys() - known:
                raise Unusable(f"{path.name}: unknown keys {sorted(unknown)} in {entry.get('id')}")
            entry = {**entry, "area": path.stem, "tests": tuple(entry.get("tests") or content["tests"])}
            try:
                mutants.append(Mutant(**entry))
            except TypeError as error:
                raise Unusable(f"{path.name}: {entry.get('id')}: {error}") from error
    ids = [mutant.id for mutant in mutants]
    if doubled := {one for one in ids if ids.count(one) > 1}:
        raise Unusable(f"ids given twice: {sorted(doubled)}")
    if sum(mutant.argued is not None for mutant in mutants) > MOST_ARGUED:
        raise Unusable(f"over {MOST_ARGUED} mutants have an argument for surviving: write a test instead")
    return mutants


def select(mutants: list[Mutant], areas: Sequence[str], ids: Sequence[str]) -> list[Mutant]:
    if missing := {*areas} - {one.area for one in mutants} | {*ids} - {one.id for one in mutants}:
        raise Unusable(f"no such area or mutant: {', '.join(sorted(missing))}")
    return [one for one in mutants if not (areas or ids) or one.area in areas or one.id in ids]


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of what git tracks or would track in `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True, text=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        for name in SHARED:
            if (root / name).is_dir():
                (copy / name).symlink_to(root / name)
        yield copy


@dataclass(frozen=True)
class Tests:
    """Runs pytest in copies of the tree. `limit`: seconds; `deselected`: tests left out, by pytest's names."""

    limit: float
    deselected: Sequence[str]

    def run(self, copy: Path, tests: Sequence[str]) -> tuple[int | None, float, str]:
        """pytest's exit code (None: out of time), seconds, and its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        return self._run(copy, [*command, *(part for name in self.deselected for part in ("--deselect", name))])

    def check_import(self, copy: Path, package: str) -> None:
        """Unusable unless `package` comes from the copy."""
        code, _, output = self._run(copy, [sys.executable, "-c", f"import {package}; print({package}.__file__)"])
        if code != 0 or not Path(output.splitlines()[-1]).resolve().is_relative_to(copy.resolve()):
            raise Unusable(f"{package} is not imported from the copy {copy}: {output[-300:]}")

    def _run(self, copy: Path, command: list[str]) -> tuple[int | None, float, str]:
        path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        # No bytecode: a mutant of the same length within a second would go unnoticed.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout=self.limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, time.perf_counter() - start, output.read().decode(errors="replace")

    def check_green(self, copy: Path, tests: Sequence[str]) -> str:
        """A line on the tests without a mutant. Unusable where they fail, run nothing, or take longer than the limit."""
        code, seconds, output = self.run(copy, tests)
        named = " ".join(tests)
        passed = re.findall(r"(\d+) passed", output)
        if code is None:
            raise Unusable(f"too slow {named}: over {self.limit:.0f} s without a mutant")
        if code != 0 or not passed:
            raise Unusable(f"red      {named}: without a mutant, exit code {code}\n{output[-3000:]}")
        return f"green    {named}: {passed[-1]} passed in {seconds:.1f} s"

    def judge(self, copy: Path, mutant: Mutant) -> Outcome:
        """The outcome of `mutant` in `copy`, which is as before afterwards."""
        path = copy / mutant.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.source(copy), encoding="utf-8")
        try:
            code, seconds, output = self.run(copy, mutant.tests)
        finally:
            path.write_text(original, encoding="utf-8")
        if code is None:
            return Outcome(mutant, "killed" if mutant.hangs else "slow", seconds, f"over {self.limit:.0f} s")
        if code in (4, 5):  # wrong arguments, or nothing was collected
            raise Unusable(f"bad      {mutant.id}: pytest ended with {code}\n{output[-1000:]}")
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
        return Outcome(mutant, "killed" if code else "survived", seconds, first[1] if first else f"exit code {code}")


def run(root: Path, mutants: list[Mutant], tests: Tests, jobs: int) -> list[Outcome]:
    """Baselines, then every mutant; prints a line each. Unusable as the module says."""
    with copied(root) as copy:
        for package in sorted({mutant.file.partition("/")[0] for mutant in mutants}):
            tests.check_import(copy, package)
    copies: Queue[Path] = Queue()
    contexts = [copied(root) for _ in range(jobs)]
    try:
        for context in contexts:
            copies.put(context.__enter__())

        def green(selection: tuple[str, ...]) -> str | Unusable:
            copy = copies.get()
            try:
                return tests.check_green(copy, selection)
            except Unusable as error:
                return error
            finally:
                copies.put(copy)

        def judge(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                outcome = tests.judge(copy, mutant)
            finally:
                copies.put(copy)
            print(outcome, flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(green, dict.fromkeys(mutant.tests for mutant in mutants)))
            print("\n".join(map(str, found)), flush=True)
            if any(isinstance(one, Unusable) for one in found):
                raise Unusable("the tests are not as they must be without a mutant: see above")
            return list(pool.map(judge, mutants))
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", nargs="+", default=[], help="files of scripts/mutants, without .yaml")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for the tests of one mutant")
    parser.add_argument("--deselect", action="append", default=[], metavar="TEST", help="red on this machine alone")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    try:
        mutants = select(read_mutants(root / "scripts" / "mutants"), options.area, options.only)
        if options.list:
            print("\n".join(f"{one.id:40} {one.file}: {one.breaks}" for one in mutants))
            return 0
        stale = []
        for mutant in mutants:
            try:
                mutant.source(root)
            except Unusable as error:
                stale.append(str(error))
        if stale:
            raise Unusable("\n".join(stale))
        outcomes = run(root, mutants, Tests(options.limit, options.deselect), options.jobs)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = [outcome for outcome in outcomes if outcome.status != "killed"]
    print(f"\n{len(outcomes)} mutants, {len(outcomes) - len(left)} killed", *left, sep="\n")
    return 1 if any(outcome.counts for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
