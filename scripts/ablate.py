"""Run a suite of ablations over seeds, and write one table, plots and results.

    python scripts/ablate.py --list
    python scripts/ablate.py schemes                       runs, or continues, scripts/suites/schemes.yaml
    python scripts/ablate.py remedies --seeds 0 1 --set trainer.total_training_steps=20
    python scripts/ablate.py schemes --save                also copies the results into benchmarks/results
    python scripts/ablate.py schemes --reuse-saved --save  continues what benchmarks/results holds, on any machine

Each run is `python -m qarl.train` in a separate process. Its folder is `OUTPUT/SUITE/ARM-sSEED`. A finished run with
the same arguments is kept, so the same command continues a suite that was interrupted. If a run of another suite has
the same config, its figures serve both suites. A failed run is tried again. With `--reuse-saved`, runs in the saved
results of any suite count as finished too; the table names the commit of each.
After every run `results.json` and `table.md` are written to `OUTPUT/SUITE`; they name command, commit and minutes.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ablation_plots import curves_of, plot_suite
from ablation_saved import config_digest, reused, saved_runs
from ablation_statistics import any_difference, run_figures, table
from ablation_suites import Run, Suite, as_arguments, load_suite, search_step, suite_names

from qarl.checkpoint.json_file import write_json
from qarl.checkpoint.run_folder import METRICS_FILE
from qarl.config import load_config
from qarl.errors import UserError
from qarl.metrics.tracker import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "benchmarks" / "results"
RECORD = "ablation_run.json"
Results = list[dict[str, Any]]


def arguments_of(suite: Suite, run: Run, folder: Path, more: Sequence[str]) -> list[str]:
    """Return the arguments of `python -m qarl.train` for one run. `more`: overrides of the command line, which win."""
    fixed = [f"config={suite.config}", f"name={run.name}", f"output_dir={folder}", f"seed={run.seed}"]
    return [*fixed, "trainer.save_final=false", *as_arguments(run.overrides), *more]


def finished(folder: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the record of a finished run of `arguments`, or None. A run of another suite is copied to `folder`;
    its minutes count there."""
    wanted = None
    for path in (folder / RECORD, *sorted(folder.parents[1].glob(f"*/*/{RECORD}"))):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if record.get("failed"):
            continue
        if path.parent == folder and record.get("arguments") == list(arguments):
            return record
        wanted = wanted or config_of(arguments)
        metrics = path.parent / METRICS_FILE
        if wanted and path.parent != folder and record.get("config") == wanted and metrics.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(metrics, folder)
            record |= {"arguments": list(arguments), "minutes": 0.0}
            write_json(folder / RECORD, record)
            return record
    return None


def config_of(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return every value of the config that `arguments` make, without the run's name and folder; None if invalid."""
    try:
        values: dict[str, Any] = load_config(arguments).model_dump(mode="json")
    except UserError:
        return None
    return {key: value for key, value in values.items() if key not in ("name", "output_dir")}


def train(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one training in a process and write its record. The output goes to `FOLDER.log`."""
    started, log = time.monotonic(), folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [sys.executable, "-m", "qarl.train", *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error:")] or lines[-1:]
    failed = None if code == 0 else f"exit code {code}: {' '.join(errors[:1])}"
    record: dict[str, Any] = {
        "arguments": list(arguments),
        "failed": failed,
        "minutes": (time.monotonic() - started) / 60,
    }
    record |= {"config": config_of(arguments), "commit": commit()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, record)
    return record


def result_of(run: Run, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return one entry of `runs` in the results: who, how long, whether it failed, and its figures."""
    entry = identity(run) | {"failed": record["failed"], "minutes": record["minutes"]}
    entry["commit"] = record.get("commit", "unknown")
    if record.get("config"):
        entry["config_digest"] = config_digest(record["config"])
    if (folder / "metrics.jsonl").is_file():
        history = read_metrics(folder)
        entry |= run_figures(history) | {"curves": curves_of(history)}
    return entry


def identity(run: Run) -> dict[str, Any]:
    """Return what names a run in the results."""
    return ({"setting": run.setting} if run.setting else {}) | {"arm": run.arm, "seed": run.seed}


class Runner:
    """Runs what is missing of a suite and writes the results after every run. `results`: the entries so far.

    `saved`: entries of saved results by the digest of their config; these runs are not made again."""

    def __init__(
        self,
        suite: Suite,
        output: Path,
        more: Sequence[str],
        jobs: int,
        command: str,
        saved: Mapping[str, dict[str, Any]],
        finished_only: bool = False,
    ) -> None:
        self.suite, self.folder, self.more, self.jobs, self.command = suite, output / suite.name, more, jobs, command
        self.saved, self.finished_only = saved, finished_only
        self.results: Results = []
        self.done: list[tuple[Run, dict[str, Any]]] = []
        self.commit = commit()

    def one(self, run: Run) -> dict[str, Any] | None:
        """Return the entry of a run, which is made if it is not finished; None if it may not be made."""
        folder = self.folder / run.name
        arguments = arguments_of(self.suite, run, self.folder, self.more)
        record = finished(folder, arguments)
        config = config_of(arguments) if record is None and self.saved else None
        if config and (saved := self.saved.get(config_digest(config))):
            entry = reused(saved, self.suite.name, identity(run))
        else:
            if record is None and self.finished_only:
                return None
            if record is None:
                print(f"{run.name}: starts", flush=True)
                record = train(arguments, folder)
            entry = result_of(run, folder, record)
        accuracy = entry.get("accuracy_after")
        outcome = entry["failed"] or ("no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}")
        print(f"{run.name}: {outcome}, {entry['minutes']:.1f} minutes", flush=True)
        return entry

    def all(self, runs: Iterable[Run]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self.one, run): run for run in runs}
            for future in as_completed(futures):
                if entry := future.result():
                    self.done.append((futures[future], entry))
                    self.write()

    def write(self, verdict: str = "") -> None:
        """Write `results.json` and `table.md` for the runs so far, in the suite's order."""
        settings, arms = list(self.suite.settings), list(self.suite.arms)
        order = {
            id(run): (settings.index(run.setting) if run.setting else 0, arms.index(run.arm), run.seed)
            for run, _ in self.done
        }
        self.results = [entry for _, entry in sorted(self.done, key=lambda pair: order[id(pair[0])])]
        text = report(self.suite, self.results, verdict, self.command)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "table.md").write_text(text, encoding="utf-8")
        write_json(
            self.folder / "results.json",
            {
                "suite": self.suite.name,
                "command": self.command,
                "commit": self.commit,
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "config": self.suite.config,
                "set": dict(self.suite.set),
                "more": list(self.more),
                "arms": {arm: dict(overrides) for arm, overrides in self.suite.arms.items()},
                "settings": {name: dict(overrides) for name, overrides in self.suite.settings.items()},
                "verdict": verdict,
                "minutes": sum(entry["minutes"] for entry in self.results),
                "runs": self.results,
            },
        )


def report(suite: Suite, results: Results, verdict: str, command: str) -> str:
    """Return the results as Markdown: the question, a table for each setting, the tests, and how it was made."""
    lines = [f"# {suite.title}", "", suite.question.strip(), ""]
    settings = list(dict.fromkeys(entry.get("setting", "") for entry in results))
    for setting in settings:
        mine = [entry for entry in results if entry.get("setting", "") == setting]
        lines += [f"## {setting}", ""] if setting else []
        lines += [table(mine, suite.baseline), ""]
        arms = dict.fromkeys(entry["arm"] for entry in mine)
        groups = [_after(mine, arm) for arm in arms]
        p = any_difference(groups)
        if p is not None and min(map(len, groups)) > 1:
            lines += [
                f"Whether the arms differ at all: p = {p:.3f} (permutation test of the sum of squares between arms).",
                "",
            ]
    if verdict:
        lines += [f"Verdict: {verdict}", ""]
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


def _after(results: Results, arm: str) -> list[float]:
    found = [entry.get("accuracy_after") for entry in results if entry["arm"] == arm and not entry["failed"]]
    return [value for value in found if value is not None]


def commit() -> str:
    """Return the commit of the checkout, with "+changes" if tracked files differ, or "unknown"."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+changes", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def search(runner: Runner) -> str:
    """Run a search to its end. Return its verdict. A failed run shows nothing about a collapse: it stops the search."""
    while True:
        if failed := [f"{run.name}: {entry['failed']}" for run, entry in runner.done if entry["failed"]]:
            return f"not decided: {'; '.join(failed)}"
        outcomes = {(run.setting, run.arm, run.seed): bool(entry.get("collapsed")) for run, entry in runner.done}
        runs, verdict = search_step(runner.suite, outcomes)
        if not runs:
            return verdict
        known = len(runner.done)
        runner.all(runs[: runner.jobs])  # a run that has collapsed may make the others of its step needless
        if len(runner.done) == known:
            return f"not decided in {known} runs; the next is {runs[0].name}"


def save(suite: Suite, folder: Path, results: Results) -> None:
    """Copy results, table and plot of a suite into benchmarks/results. Say which runs are not in the plot."""
    if missing := [f"{entry['arm']} s{entry['seed']}" for entry in results if not entry.get("curves")]:
        print(f"note: no curves are known of these runs, so the plot lacks them: {', '.join(missing)}")
    for name, kind in (("results.json", "json"), ("table.md", "md"), ("curves.png", "png")):
        shutil.copy(folder / name, SAVED / f"ablate_{suite.name}_cpu.{kind}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite. Return 0, or 1 if a run failed, or 2 if the suite cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", help=f"one of {', '.join(suite_names())}")
    parser.add_argument("--list", action="store_true", help="list the suites and their arms, and stop")
    parser.add_argument("--seeds", nargs="+", type=int, help="other seeds than the suite's")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for every run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/ablate"))
    parser.add_argument("--reuse-saved", action="store_true", help="count the runs in benchmarks/results as finished")
    parser.add_argument("--finished-only", action="store_true", help="train nothing; write what is finished")
    parser.add_argument("--save", action="store_true", help="copy the results into benchmarks/results at the end")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "scripts/ablate.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        if args.list or not args.suite:
            for name in suite_names():
                suite = load_suite(name)
                print(f"{name}: {suite.title}; {', '.join(suite.arms)}; seeds {', '.join(map(str, suite.seeds))}")
            return 0
        suite = chosen(load_suite(args.suite), args.seeds, args.arms)
        saved = saved_runs(SAVED) if args.reuse_saved else {}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runner = Runner(suite, args.output.absolute(), args.set, args.jobs, command, saved, args.finished_only)
    if suite.settings:
        verdict = search(runner)
    else:
        runner.all(suite.runs())
        verdict = ""
    runner.write(verdict)
    plot_suite(runner.results, runner.folder / "curves.png")
    print((runner.folder / "table.md").read_text(encoding="utf-8"))
    if args.save:
        save(suite, runner.folder, runner.results)
    return 1 if any(entry["failed"] for entry in runner.results) else 0


def chosen(suite: Suite, seeds: Sequence[int] | None, arms: Sequence[str] | None) -> Suite:
    """Return the suite with these seeds and arms only. Raise UserError for an arm that it does not have."""
    from dataclasses import replace

    unknown = sorted(set(arms or ()) - set(suite.arms))
    if unknown:
        raise UserError(
            f"no such arm: {', '.join(unknown)}", where=suite.name, fix=f"choose from {', '.join(suite.arms)}"
        )
    kept = {arm: overrides for arm, overrides in suite.arms.items() if not arms or arm in arms}
    baseline = suite.baseline if suite.baseline in kept else None
    return replace(suite, arms=kept, baseline=baseline, seeds=tuple(seeds) if seeds else suite.seeds)


if __name__ == "__main__":
    sys.exit(main())
