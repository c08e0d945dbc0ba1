"""Deliberate faults: does the test file that should notice each of them fail?

    python -m benchmarks.faults                     all faults of faults.toml; about a minute each
    python -m benchmarks.faults tbpo quant.zero     those whose names begin so
    python -m benchmarks.faults --list              nothing runs

Each fault is one replacement in a copy of the tree, first on PYTHONPATH, so that subprocesses import it too. A text
that is not in its module exactly once is reported as stale. Exit code: 0 if every test file failed, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
LINKED = ("models", "data")
"""Folders that git ignores and tests read."""
SECONDS = 900


@dataclass(frozen=True)
class Fault:
    name: str
    path: str
    old: str
    new: str
    test: str
    breaks: str

    def place(self, root: Path) -> tuple[Path, str] | None:
        """Return the module that has the text `old`, and the module's text with the fault; None if it is stale."""
        where = root / self.path
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        matches = [
            (file, text, len(pattern.findall(text)))
            for file in (
                sorted(where.rglob("*.py"))
                if where.is_dir()
                else [where]
                if where.is_file()
                else []
            )
            if pattern.search(text := file.read_text(encoding="utf-8"))
        ]
        if sum(count for *_, count in matches) != 1:
            return None
        file, text, _ = matches[0]
        return file, pattern.sub(lambda _: self.new, text)


def faults() -> list[Fault]:
    areas = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    return [
        Fault(f"{area}.{name}", **entry)
        for area, entries in areas.items()
        for name, entry in entries.items()
    ]


def copy_tree(target: Path) -> None:
    """Copy what git tracks, and link what tests read beside it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in LINKED:
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())


def verdict(fault: Fault, copy: Path) -> str:
    """Run the fault's test file in `copy` with the fault. `copy` is as before afterwards."""
    place = fault.place(copy)
    if place is None:
        return "stale: its text is not there exactly once"
    file, changed = place
    before = file.read_text(encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    try:
        file.write_text(changed, encoding="utf-8")
        run = subprocess.run(
            [*command, *shlex.split(fault.test)],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    finally:
        file.write_text(before, encoding="utf-8")
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.MULTILINE)
    if run.returncode == 1 and first:
        return f"noticed by {first[1]}"
    return (
        "NOT NOTICED"
        if run.returncode == 0
        else f"pytest ended with {run.returncode}: {run.stdout[-300:]}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    chosen = [fault for fault in faults() if fault.name.startswith(tuple(args.names))]
    if args.list:
        print(*(f"{fault.name:38} {fault.path}: {fault.breaks}" for fault in chosen), sep="\n")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_tree(Path(folder))
        for fault in chosen:
            outcome = verdict(fault, Path(folder))
            bad += not outcome.startswith("noticed")
            print(f"{fault.name:38} {outcome}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults were noticed")
    return int(bool(bad) or not chosen)


if __name__ == "__main__":
    sys.exit(main())
