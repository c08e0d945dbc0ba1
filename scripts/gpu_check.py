"""The first session on a GPU: everything that needs one, in the order of what decides most.

    scripts/gpu_check.sh                    the first parts, nine minutes a call
    scripts/gpu_check.sh --parts second     the other schemes, levels, kernels and figures
    scripts/gpu_check.sh --parts several    what needs 2 to 8 GPUs
    scripts/gpu_check.sh --parts NAME,NAME  some parts
    scripts/gpu_check.sh --cpu              a rehearsal on a CPU: small sizes; what needs a GPU is skipped

Each part is a process with a limit on its time: one that fails or hangs takes none of the others with it. A call ends
within nine minutes. It starts a part only if there is time for it on a warm machine, and the next call goes on. Stop
the script at any point. All lines that were printed are in benchmarks/results/gpu_check_DATE.log, and after each part
gpu_check_DATE.json and .md are written. The next call on the same day skips the parts that have passed and runs those
that failed last; --again repeats all. A part for which no time is left keeps its earlier result. Exit code: 0 no
part failed; 1 some failed; 130 stopped.
A missed bound is not a failure. No network. Models have random weights, and stay in the folder --scratch.

--packages FOLDER takes wheels and archives of scripts/strip_vllm.py along, for a machine without a network. --caches
FOLDER restores what an earlier call compiled, if driver and packages are the same; every call on a GPU leaves it in
the folder of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_caches
from gpu_packages import unpack
from gpu_pages import Result, markdown, verdict_table
from gpu_parts import BEFORE, FIRST_CALL, GROUPS, PARTS, Part, gpus, nvidia

from qarl.bench.report import PACKAGES, commit
from qarl.checkpoint.storage import METRICS_FILE, read_lines, write_text
from qarl.metrics.tracker import cpu
from qarl.process import package_versions

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 540
SAVING_SECONDS = 30
"""What remains for saving the caches."""
LEAST_SECONDS = 5
MOST_LINES = 400
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if prctl := getattr(ctypes.CDLL(None), "prctl", None):
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else it was killed before prctl
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""What runs before each command and becomes it. `preexec_fn` would do the same but copies this process's page tables,
which a machine with little memory refuses to a large process."""
NO_GPU = "needs a GPU"
NO_TIME = "no time was left; the next call runs it"
FAILING = re.compile(
    r"(?:(?:FAILED|ERROR) (\S+::.+?)|(\S+::.+?) (?:FAILED|ERROR))(?: +- .*| +\[ *\d+%\])?"
)
"""A line of pytest's that names a test that failed, as it runs or at the end."""
STOP = threading.Event()
"""Set if somebody asks the script to stop. Its process then ends, and every line that it printed is still read."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", action="store_true", help="a rehearsal with small sizes on the CPU"
    )
    parser.add_argument(
        "--parts", default="first", help="first, second, several, all, or names with commas"
    )
    parser.add_argument("--again", action="store_true", help="repeat parts that have passed today")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results"
    )
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "runs" / "gpu_check", help="folder of large models"
    )
    parser.add_argument("--packages", type=Path, help="folder of wheels and archives to unpack")
    parser.add_argument("--caches", type=Path, help="folder of an earlier call's results")
    args = parser.parse_args(argv)
    names = [p.name for p in GROUPS[args.parts]] if args.parts in GROUPS else args.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join((*PARTS, *GROUPS))}"
        )
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: STOP.set())
    session = Session(args.output, args.scratch, cpu=args.cpu)
    session.prepare(args.packages, args.caches)
    return session.run([PARTS[name] for name in names], again=args.again)


class Session:
    """Runs parts and keeps their results in `path`.json, .md and .log."""

    def __init__(self, folder: Path, scratch: Path, *, cpu: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cpu, self.output, self.scratch = cpu, folder.resolve(), scratch.resolve()
        self.path = (
            folder
            / f"{'cpu' if cpu else 'gpu'}_check_{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        )
        self.site: Path | None = None
        """Where the packages are that were taken along."""
        self.prepared: list[str] = []
        file = self.path.with_suffix(".json")
        self.results: dict[str, Result] = (
            json.loads(file.read_text())["parts"] if file.is_file() else {}
        )

    def prepare(self, packages: Path | None, caches: Path | None) -> None:
        """Unpack packages and restore caches, as far as they are given."""
        if packages is not None:
            self.site = self.scratch / "site"
            self.prepared.append(unpack(packages, self.site))
            sys.path.append(str(self.site))
        if caches is not None:
            self.prepared.append(gpu_caches.restore(caches, self.versions()))

    def versions(self) -> dict[str, str]:
        """Return the device, its driver and the packages that compile for it. No context is made on the GPU, whose
        memory vLLM measures."""
        named = nvidia("--query-gpu=name,driver_version", "--format=csv,noheader")
        device = cpu()["model"] if self.cpu else (named.splitlines() or ["no GPU"])[0]
        return {"device": device} | dict(package_versions(PACKAGES))

    def run(self, parts: Sequence[Part], *, again: bool) -> int:
        """Run the parts in order, those that failed before last; the exit code."""
        # a CPU may be shared
        started = time.monotonic()
        total = TOTAL_SECONDS * 3 if self.cpu else TOTAL_SECONDS - SAVING_SECONDS
        begun = False
        with self.path.with_suffix(".log").open("a", encoding="utf-8") as self.log, \
                tempfile.TemporaryDirectory() as folder:  # fmt: skip
            for line in self.prepared:
                self.say(f"== {line}")
            for part in sorted(parts, key=lambda part: self.status(part) == "failed"):
                left = total - (time.monotonic() - started)
                if self.status(part) == "passed" and not again:
                    self.say(f"== {part.name}: passed before ({self.results[part.name]['commit']})")
                elif left < (part.seconds if begun else LEAST_SECONDS):
                    self.say(f"== {part.name}: {NO_TIME}")
                else:
                    begun = True
                    self.take(part, Path(folder), part.seconds * FIRST_CALL, left)
                    self.write()
                if STOP.is_set():
                    self.say(f"== stopped in {part.name}; the parts before it are kept")
                    break
            if "bench" in self.results:
                self.say(verdict_table(self.results["bench"], cpu=self.cpu))
            if begun and not self.cpu:
                self.say(f"== {gpu_caches.save(self.output, self.versions())}")
            self.say(f"results: {self.path}.json, .md and .log")
        return 130 if STOP.is_set() else int(any(self.status(part) == "failed" for part in parts))

    def status(self, part: Part) -> str | None:
        return self.results.get(part.name, {}).get("status")

    def take(self, part: Part, folder: Path, limit: float, left: float) -> None:
        """Run one part and store its result. What it has printed is stored, too, if it is stopped.

        limit: its own limit in seconds. left: seconds until the limit of all parts.
        """
        self.say(f"== {part.name}")
        command = part.cpu if self.cpu else part.gpu
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        why = NO_GPU if command is None else f"{', '.join(missing)} not installed"
        result: Result = {
            "status": "skipped",
            "why": why,
            "seconds": 0.0,
            "commit": commit(),
            "output": [],
        }
        self.results[part.name] = result
        if command is not None and not missing:
            result.update(status="stopped", why="the script was stopped in this part")
            self.write()  # a process that is killed has no later chance
            start = time.monotonic()
            report = folder / f"{part.name}.json"
            seconds = min(limit, left)
            code = self.process(command, folder, report, seconds, result["output"])
            result["failing"] = failing(result["output"])
            del result["output"][:-MOST_LINES]
            result.update(
                seconds=time.monotonic() - start, report=read_report(part, folder, report)
            )
            if not STOP.is_set() and code is None and left < limit:
                result.update(status="skipped", why=NO_TIME)
            elif not STOP.is_set():
                why = f"not done after {seconds:.0f} s" if code is None else f"exit code {code}"
                result.update(
                    status="passed" if code == 0 else "failed", why=None if code == 0 else why
                )
        self.say(
            f"== {part.name}: {result['status']} ({result['seconds']:.0f} s) {result['why'] or ''}"
        )

    def process(
        self, command: str, folder: Path, report: Path, seconds: float, output: list[str]
    ) -> int | None:
        """The exit code, or None past the limit. Lines are appended to `output` and the log as they come."""
        environment = os.environ | {"QARL_GPU_CHECK_REPORT": str(report), "PYTHONUNBUFFERED": "1"}
        if self.site is not None:
            paths = [str(self.site), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self.cpu and ("pytest" in command or "gpu_probe" in command):
            environment["TRITON_INTERPRET"] = "1"
        places = {
            "folder": folder,
            "report": report,
            "output": self.output,
            "scratch": self.scratch,
        }
        fields = {name: shlex.quote(str(place)) for name, place in places.items()} | {
            "gpus": gpus()
        }
        python = shlex.quote(sys.executable)
        preparations = [
            f"{python} {makes.format(**fields)} && "
            for named, makes in BEFORE.items()
            if named in command
        ]
        line = f"{''.join(preparations)}exec {python} {command.format(**fields)}"

        def keep(printed: str) -> None:
            output.append(printed)
            self.say(printed)

        return run(["sh", "-c", line], environment, seconds, keep)

    def say(self, line: str) -> None:
        self.log.write(line + "\n")
        self.log.flush()
        with contextlib.suppress(OSError):  # the terminal is gone
            print(line, flush=True)

    def write(self) -> None:
        """Write the .json and .md whole, so that a reader never finds half a file."""
        versions = self.versions()
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": versions.pop("device"),
            "versions": versions,
            "commit": commit(),
            "parts": self.results,
        }
        write_text(self.path.with_suffix(".json"), json.dumps(document, indent=1) + "\n")
        write_text(self.path.with_suffix(".md"), markdown(document, self.cpu))


def run(
    command: list[str], environment: dict[str, str], seconds: float, keep: Callable[[str], None]
) -> int | None:
    """The exit code, or None past the limit. Whatever the command started ends with it: the GPU is free again.

    If this script is killed, Linux kills the command's process, but not what that has started.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command],
        cwd=ROOT, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    late = threading.Event()
    finished = threading.Event()
    deadline = time.monotonic() + seconds

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        while not finished.wait(0.05):
            if STOP.is_set() or time.monotonic() > deadline:
                late.set()
                return end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            keep(line.rstrip("\n"))
        code = process.wait()
        return None if late.is_set() else code
    finally:
        finished.set()
        end()
        process.wait()


def failing(output: list[str]) -> list[str]:
    """Return the names of the tests that failed, each once."""
    matches = (FAILING.fullmatch(line.strip()) for line in output)
    return list(dict.fromkeys(match[1] or match[2] for match in matches if match))


def read_report(part: Part, folder: Path, report: Path) -> Any:
    """The part's own JSON, or the measurements of each training step."""
    if report.is_file():
        return json.loads(report.read_text())
    if not (folder / "run").is_dir():
        return None
    trained = (folder / "run").rename(
        folder / f"{part.name}_run"
    )  # the next part trains in a folder of that name
    steps = read_lines(trained / METRICS_FILE)
    pattern = re.compile(r"mismatch/|publish/|timing|_s$|step$|quant_align")
    return {
        "steps": [
            {key: value for key, value in step.items() if pattern.search(key)} for step in steps
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
