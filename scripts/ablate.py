"""Run a suite of ablations over seeds, and write one table, plots and results.

    python scripts/ablate.py --list
    python scripts/ablate.py schemes                       runs, or continues, scripts/suites/schemes.yaml
    python scripts/ablate.py remedies --seeds 0 1 --set trainer.total_training_steps=20
    python scripts/ablate.py schemes --save                also copies the results into benchmarks/results
    python scripts/ablate.py schemes --reuse-saved --save  the same, without the runs that benchmarks/results has

A suite names a config, overrides for all runs (`set`), seeds, and arms: each a mapping of config keys, whose texts may
name {folder} (OUTPUT/SUITE) and {seed}: an arm can begin where an earlier one ended, and fails while that one has not.
Each run is `python -m qarl.train` in a separate process. Its folder is `OUTPUT/SUITE/ARM-sSEED`. A finished run with
the same arguments is kept, so the same command continues a suite that was interrupted. A failed run is tried again.
After every run `results.json` and `table.md` are written to `OUTPUT/SUITE`; they name command, commit and minutes.
With `--reuse-saved` a run that the committed results have, with the same keys, is taken from there, so that a suite of
many hours continues on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ablation_plots import curves_of, plot_suite
from ablation_statistics import figures_of, permutation_test, run_figures, table

from qarl.bench.report import commit
from qarl.checkpoint.storage import write_json
from qarl.errors import UserError
from qarl.metrics.tracker import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "benchmarks" / "results"
SUITES = Path(__file__).with_name("suites")
RECORD = "ablation_run.json"
Results = list[dict[str, Any]]


class Run(NamedTuple):
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    question: str
    config: str
    seeds: tuple[int, ...]
    arms: Mapping[str, Mapping[str, Any]]
    set: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None

    def runs(self) -> list[Run]:
        """Return the runs seed by seed, so that an early stop leaves whole comparisons."""
        return [Run(arm, seed) for seed in self.seeds for arm in self.arms]

    def arguments(self, run: Run, folder: Path, more: Sequence[str]) -> list[str]:
        """Return the arguments of `python -m qarl.train` for a run. `more`: overrides that win."""
        fixed = [
            f"config={self.config}",
            f"name={run.name}",
            f"output_dir={folder}",
            f"seed={run.seed}",
        ]
        overrides = {"trainer.save_final": False, **self.set, **self.arms[run.arm]}
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in overrides.items()
        }
        settings = (
            f"{k}={v}".replace("{folder}", str(folder)).replace("{seed}", str(run.seed))
            for k, v in texts.items()
        )
        return [*fixed, *settings, *more]


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def load_suite(
    name: str, seeds: Sequence[int] | None = None, arms: Sequence[str] | None = None
) -> Suite:
    """Return a suite, with these seeds and arms only. Raise UserError if there is no such suite or arm."""
    path = SUITES / f"{name}.yaml"
    if not path.is_file():
        raise UserError(
            f"there is no suite {name!r}",
            where=str(SUITES),
            fix=f"choose from {', '.join(suite_names())}",
        )
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    suite = Suite(name=name, **{**content, "seeds": tuple(seeds or content["seeds"])})
    if unknown := {suite.baseline, *(arms or ())} - {None, *suite.arms}:
        what = f"no such arm: {', '.join(map(str, unknown))}"
        raise UserError(what, where=str(path), fix=f"choose from {', '.join(suite.arms)}")
    selected = {
        arm: overrides or {} for arm, overrides in suite.arms.items() if not arms or arm in arms
    }
    return replace(
        suite, arms=selected, baseline=suite.baseline if suite.baseline in selected else None
    )


def finished(folder: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the record of a finished run of `arguments`, or None."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return (
        record if not record.get("failed") and record.get("arguments") == list(arguments) else None
    )


def saved_entries(suite: Suite, more: Sequence[str]) -> dict[Run, dict[str, Any]]:
    """Return the runs of the committed results that finished with the keys that they would have now."""
    path = SAVED / f"ablate_{suite.name}_cpu.json"
    if not path.is_file():
        return {}
    results = json.loads(path.read_text(encoding="utf-8"))
    keys = {"config": suite.config, "set": dict(suite.set), "more": list(more)}
    if any(results[key] != value for key, value in keys.items()):
        return {}
    return {
        Run(entry["arm"], entry["seed"]): entry
        for entry in results["runs"]
        if not entry["failed"] and results["arms"][entry["arm"]] == suite.arms.get(entry["arm"])
    }


def train(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one training in a process and write its record. The output goes to `FOLDER.log`."""
    started = time.monotonic()
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "qarl.train", *arguments]
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error:")] or lines[-1:]
    failed = None if code == 0 else f"exit code {code}: {' '.join(errors[:1])}"
    minutes = (time.monotonic() - started) / 60
    record = {
        "arguments": list(arguments),
        "failed": failed,
        "minutes": minutes,
        "commit": commit(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, record)
    return record


class Runner:
    """Runs what is missing of a suite and writes the results after every run.

    `results`: the entries so far. `saved`: entries of runs that are not repeated."""

    def __init__(
        self, suite: Suite, output: Path, more: Sequence[str], jobs: int, command: str
    ) -> None:
        self.suite = suite
        self.folder = output / suite.name
        self.more = more
        self.jobs = jobs
        self.command = command
        self.saved: dict[Run, dict[str, Any]] = {}
        self.results: Results = []

    def entry(self, run: Run) -> dict[str, Any]:
        """Return the entry of a run, which is made if it is not finished."""
        if run in self.saved:
            return self.saved[run]
        folder = self.folder / run.name
        arguments = self.suite.arguments(run, self.folder, self.more)
        record = finished(folder, arguments)
        if record is None:
            print(f"{run.name}: starts", flush=True)
            record = train(arguments, folder)
        entry = {"arm": run.arm, "seed": run.seed} | {
            key: record[key] for key in ("failed", "minutes", "commit")
        }
        if (folder / "metrics.jsonl").is_file():
            history = read_metrics(folder)
            entry |= run_figures(history) | {"curves": curves_of(history)}
        accuracy = entry.get("accuracy_after")
        outcome = entry["failed"] or (
            "no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}"
        )
        print(f"{run.name}: {outcome}, {entry['minutes']:.1f} minutes", flush=True)
        return entry

    def all(self) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            for future in as_completed([pool.submit(self.entry, run) for run in self.suite.runs()]):
                self.results.append(future.result())
                self.write()

    def write(self) -> None:
        """Write `results.json` and `table.md` for the runs so far, in the suite's order."""
        suite = self.suite
        arms = {arm: dict(overrides) for arm, overrides in self.suite.arms.items()}
        self.results.sort(key=lambda entry: (list(arms).index(entry["arm"]), entry["seed"]))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "table.md").write_text(
            report(suite, self.results, self.command), encoding="utf-8"
        )
        about = {
            "suite": suite.name,
            "command": self.command,
            "commit": commit(),
            "config": suite.config,
        }
        about["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        how = {"set": dict(suite.set), "more": list(self.more), "arms": arms}
        minutes = sum(entry["minutes"] for entry in self.results)
        write_json(
            self.folder / "results.json", about | how | {"minutes": minutes, "runs": self.results}
        )


def report(suite: Suite, results: Results, command: str) -> str:
    """Return the results as Markdown: the question, the table, the tests, and how it was made."""
    lines = [f"# {suite.title}", "", suite.question.strip(), "", table(results, suite.baseline), ""]
    arms = dict.fromkeys(entry["arm"] for entry in results)
    done = [
        [entry for entry in results if entry["arm"] == arm and not entry["failed"]] for arm in arms
    ]
    groups = [figures_of(entries, "accuracy_after") for entries in done]
    if len(groups) > 1 and min(map(len, groups)) > 1:
        p, _ = permutation_test(*groups)
        sentence = f"Whether the arms differ at all: p = {p:.3f} (permutation test of the sum of squares between arms)."
        lines += [sentence, ""]
    minutes = sum(entry["minutes"] for entry in results)
    seeds = len({entry["seed"] for entry in results})
    commits = " and ".join(dict.fromkeys(entry["commit"] for entry in results))
    few = " Two seeds prove nothing: p cannot be below 0.333." if seeds == 2 else ""
    lines += [
        "± is the standard deviation over seeds. p: two-sided permutation test of the difference of means against the "
        "baseline, not corrected for the number of arms; in brackets the smallest p that this number of seeds allows."
        f"{few}",
        "",
        f"`{command}`, commit {commits}, {len(results)} runs, {minutes:.0f} minutes in all.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite. Return 0, or 1 if a run failed, or 2 if the suite cannot be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="?", help=f"one of {', '.join(suite_names())}")
    parser.add_argument(
        "--list", action="store_true", help="list the suites and their arms, and stop"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="other seeds than the suite's")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for every run"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"))
    parser.add_argument(
        "--save", action="store_true", help="copy the results into benchmarks/results at the end"
    )
    parser.add_argument(
        "--reuse-saved", action="store_true", help="do not repeat runs that benchmarks/results has"
    )
    args = parser.parse_args(argv)
    command = shlex.join(["python", "scripts/ablate.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        if args.list or not args.suite:
            for name in suite_names():
                suite = load_suite(name)
                print(
                    f"{name}: {suite.title}; {', '.join(suite.arms)}; seeds {', '.join(map(str, suite.seeds))}"
                )
            return 0
        suite = load_suite(args.suite, args.seeds, args.arms)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runner = Runner(suite, args.output.absolute(), args.set, args.jobs, command)
    if args.reuse_saved:
        runner.saved = saved_entries(suite, args.set)
    runner.all()
    plot_suite(runner.results, runner.folder / "curves.png")
    print((runner.folder / "table.md").read_text(encoding="utf-8"))
    for name, kind in (
        (("results.json", "json"), ("table.md", "md"), ("curves.png", "png")) if args.save else ()
    ):
        shutil.copy(runner.folder / name, SAVED / f"ablate_{suite.name}_cpu.{kind}")
    return 1 if any(entry["failed"] for entry in runner.results) else 0


if __name__ == "__main__":
    sys.exit(main())
