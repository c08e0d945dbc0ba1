"""Mutation tests: each mutant is one realistic fault in a copy of the tree, and the tests of its area must notice it.

    python scripts/mutate.py                        all areas; an hour or two
    python scripts/mutate.py --area tbpo quant      some areas
    python scripts/mutate.py --only ID ...          some mutants
    python scripts/mutate.py --list                 what there is; nothing runs

Mutants are in scripts/mutants/AREA.yaml:

    tests: [tests/tbpo/test_tbpo.py]     arguments for pytest; green without mutants, and done within the limit
    mutants:
      - id: tbpo-cap-one-sided
        file: qarl/tbpo/loss.py
        old: mismatch.clamp(1 / cap, cap)       stands in the file exactly once
        new: mismatch.clamp(max=cap)
        breaks: what goes wrong, and for whom
        tests: [...]    optional, in place of the area's
        hangs: true     optional: running into the limit is how it is noticed
        argued: reason  optional: why it may survive; at most two mutants may

The checkout is never edited: each job has a copy, first on PYTHONPATH, so that subprocesses import the mutant too. What
PYTHONPATH holds already stays behind it. Unmutated tests run first. A test must fail: a mutant that ends pytest in
another way is broken, and counts as alive. Exit codes: 0; 1 if a mutant that is not argued is alive; 2 if there is no
verdict: the text `old` of a mutant is not exactly once in its file (update the mutant), tests fail without
a mutant, or a bad file of mutants.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TypeVar

from mutant_files import Mutant, Unusable, check_fit, read_mutants, select

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60.0
# Folders that git ignores and tests read.
SHARED = ("models", "data")
_TIMES = itertools.count(1)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """`status` is killed, survived, slow or broken (pytest could not run its tests); `by` is the first that failed."""

    mutant: Mutant
    status: str
    seconds: float
    by: str

    def __str__(self) -> str:
        what = self.by if self.status == "killed" else f"{self.mutant.file}: {self.mutant.breaks}"
        argued = f" (argued: {self.mutant.argued})" if self.mutant.argued else ""
        return f"{self.status:8} {self.mutant.id:40} {self.seconds:5.1f} s  {what}{argued}"


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of what git tracks or would track in `root`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder)
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        for name in SHARED:
            if (root / name).is_dir():
                (copy / name).symlink_to(root / name)
        yield copy


@dataclass(frozen=True)
class Runner:
    """Runs pytest in copies of the tree. `limit`: seconds; `deselected`: tests left out, by pytest's names."""

    limit: float
    deselected: Sequence[str]

    def pytest(self, copy: Path, tests: Sequence[str]) -> tuple[int | None, float, str]:
        """pytest's exit code (None: out of time), seconds, and its output."""
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        return self.python(copy, [*command, *(f"--deselect={name}" for name in self.deselected)])

    def python(self, copy: Path, arguments: list[str]) -> tuple[int | None, float, str]:
        path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        start, code = time.perf_counter(), None
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=self.limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if code is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, time.perf_counter() - start, output.read().decode(errors="replace")

    def check_import(self, copy: Path, package: str) -> None:
        """Unusable unless `package` comes from the copy."""
        code, _, output = self.python(copy, ["-c", f"import {package}; print({package}.__file__)"])
        if code != 0 or not Path(output.splitlines()[-1]).resolve().is_relative_to(copy.resolve()):
            raise Unusable(f"{package} is not imported from the copy {copy}: {output[-300:]}")

    def check_green(self, copy: Path, tests: Sequence[str]) -> str | None:
        """Faults of the tests without a mutant: they fail, run nothing, or take longer than the limit."""
        code, seconds, output = self.pytest(copy, tests)
        named, passed = " ".join(tests), re.findall(r"(\d+) passed", output)
        if code is None:
            return f"too slow {named}: over {self.limit:.0f} s without a mutant"
        if code != 0 or not passed:
            return f"red      {named}: exit code {code} without a mutant\n{output[-3000:]}"
        print(f"green    {named}: {passed[-1]} passed in {seconds:.1f} s", flush=True)
        return None

    def judge(self, copy: Path, mutant: Mutant) -> Outcome:
        """The outcome of `mutant` in `copy`, which is as before afterwards."""
        path = copy / mutant.file
        original, stat = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.source(copy), encoding="utf-8")
        # Bytecode is kept by time and size: without another time a mutant of the same size would not run.
        os.utime(path, (next(_TIMES),) * 2)
        try:
            code, seconds, output = self.pytest(copy, mutant.tests)
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        first = re.search(r"^(?:FAILED|ERROR) (\S+\.py\S*)", output, flags=re.MULTILINE)
        by = f"over {self.limit:.0f} s" if code is None else first[1] if first else f"exit code {code}"
        if code is None:
            status = "killed" if mutant.hangs else "slow"
        else:
            status = {0: "survived", 1: "killed"}.get(code, "broken")
        outcome = Outcome(mutant, status, seconds, by)
        print(outcome, flush=True)
        return outcome


def run(root: Path, mutants: list[Mutant], runner: Runner, jobs: int) -> list[Outcome]:
    """Unmutated tests, then every mutant; prints a line each. Unusable as the module says."""
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        copies: Queue[Path] = Queue()
        for _ in range(jobs):
            copies.put(stack.enter_context(copied(root)))

        def with_a_copy(call: Callable[[Path], Result]) -> Result:
            copy = copies.get()
            try:
                return call(copy)
            finally:
                copies.put(copy)

        # Tests load scripts, which are no package, from the tree that they lie in themselves.
        for package in sorted({mutant.file.partition("/")[0] for mutant in mutants} - {"scripts"}):
            with_a_copy(partial(runner.check_import, package=package))
        selections = dict.fromkeys(mutant.tests for mutant in mutants)
        found = pool.map(lambda tests: with_a_copy(lambda copy: runner.check_green(copy, tests)), selections)
        if wrong := [problem for problem in found if problem]:
            raise Unusable("\n".join(wrong))
        return list(pool.map(lambda mutant: with_a_copy(lambda copy: runner.judge(copy, mutant)), mutants))


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
        check_fit(mutants, root)
        if options.list:
            print("\n".join(f"{one.id:40} {one.file}: {one.breaks}" for one in mutants))
            return 0
        outcomes = run(root, mutants, Runner(options.limit, options.deselect), options.jobs)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = [outcome for outcome in outcomes if outcome.status != "killed"]
    print(f"\n{len(outcomes)} mutants, {len(outcomes) - len(left)} killed", *left, sep="\n")
    return 1 if any(outcome.mutant.argued is None for outcome in left) else 0


if __name__ == "__main__":
    sys.exit(main())
