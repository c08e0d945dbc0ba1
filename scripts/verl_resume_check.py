"""End verl runs with SIGKILL or another signal, resume them, and check that they go on from the state that was saved.

    python scripts/verl_resume_check.py --kills 5 --output result.json
    python scripts/verl_resume_check.py --signal SIGINT

Each time: a run of eight steps with a checkpoint every two gets the signal by process id at a random moment, from the
logging of its first step to about its last, inside steps and checkpoints alike; and is started again with
`trainer.resume_mode=auto`. Checked:

    weights, optimizer, scheduler, RNG   by checksum, on every rank: verl's own load is followed by a comparison with
                                         the record written at the save (`qarl.verl.checkpoint`)
    data position                        the steps after the checkpoint ask the prompts that the killed run's asked; a
                                         kill right after a checkpoint leaves none to compare

    the end                              by SIGINT and SIGTERM: exit code 130 within a minute, the answer that names
                                         what the repeated command does, and no process left

A run killed before its first checkpoint starts fresh: only its prompts are compared. Sampling is not bitwise repeatable
across verl's servers, so later steps are not compared. The result is JSON, written after each kill; the exit code is 1
on any difference.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from qarl.checkpoint.json_file import write_json
from qarl.checkpoint.run_folder import METRICS_FILE
from qarl.metrics.tracker import read_metrics

SAVE_FREQ, LAST = 2, 8
COMMIT = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
_VERIFIED = re.compile(r"rank (\d+): resumed state equals the saved one by checksum: (\d+) parts, (\w+)")


def command(name: str, args: argparse.Namespace, dumps: Path) -> list[str]:
    settings = {
        "name": name,
        "output_dir": args.runs,
        "trainer.total_training_steps": LAST,
        "trainer.save_freq": SAVE_FREQ,
        "trainer.val_before_train": "false",
        "trainer.plots": "false",
        "trainer.logger": "[console]",
        "trainer.n_gpus_per_node": args.ranks,
        "verl.trainer.rollout_data_dir": dumps,
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "qarl.train", "config=quickstart_verl.yaml", *given, *args.overrides]


def logged_steps(run_dir: Path) -> int:
    if not (run_dir / METRICS_FILE).is_file():
        return 0
    return max((int(entry["step"]) for entry in read_metrics(run_dir)), default=0)


def run_and_kill(name: str, args: argparse.Namespace, delay: float) -> dict[str, Any]:
    """Start the run and end it `delay` seconds after step 1 was logged, or once its last but one step is.

    Returns how it ended: empty for SIGKILL, which leaves Ray to notice."""
    run_dir = Path(args.runs) / name
    with (Path(args.runs) / f"{name}.killed.log").open("wb") as log:
        process = subprocess.Popen(
            command(name, args, run_dir.with_suffix(".killed")), stdout=log, stderr=subprocess.STDOUT
        )
        end = None
        while (step := logged_steps(run_dir)) < LAST - 1 and (end is None or time.monotonic() < end):
            if process.poll() is not None:
                raise SystemExit(f"{name} ended by itself with {process.returncode}, see {log.name}")
            if step and end is None:
                end = time.monotonic() + delay
            time.sleep(0.05)
        processes = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.Signals[args.signal])
        begin = time.monotonic()
        code = process.wait()
    if args.signal == "SIGKILL":
        return {}
    seconds, text = time.monotonic() - begin, Path(log.name).read_text(encoding="utf-8", errors="replace")
    left = [child.pid for child in psutil.wait_procs(processes, timeout=10)[1]]
    answered = "stopping verl now" in text and "if you repeat the command" in text
    ok = code == 130 and seconds < 60 and answered and not left
    return {"exit_code_at_signal": code, "seconds_to_end": round(seconds, 1), "processes_left": len(left), "ended": ok}


def prompts_of_step(folder: Path, step: int) -> list[str]:
    lines = (folder / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line)["input"] for line in lines)


def last_checkpoint(run_dir: Path) -> int:
    """The step that verl would go on from; 0 if there is no checkpoint."""
    tracker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


def check(name: str, args: argparse.Namespace, delay: float) -> dict[str, Any]:
    """One kill and one resume; what was compared, and whether it was equal."""
    run_dir = Path(args.runs) / name
    ended = run_and_kill(name, args, delay)
    killed_after, checkpoint = logged_steps(run_dir), last_checkpoint(run_dir)
    killed, resumed = run_dir.with_suffix(".killed"), run_dir.with_suffix(".resumed")
    with (Path(args.runs) / f"{name}.resumed.log").open("wb") as log:
        code = subprocess.run(command(name, args, resumed), stdout=log, stderr=subprocess.STDOUT).returncode
    text = (Path(args.runs) / f"{name}.resumed.log").read_text(encoding="utf-8", errors="replace")
    verified = {int(rank): (int(parts), digest) for rank, parts, digest in _VERIFIED.findall(text)}
    again = [step for step in range(checkpoint + 1, killed_after + 1) if (killed / f"{step}.jsonl").is_file()]
    same_prompts = all(
        (resumed / f"{step}.jsonl").is_file() and prompts_of_step(killed, step) == prompts_of_step(resumed, step)
        for step in again
    )
    # verl's own thread writes them: that of the last step may not be there yet.
    dumped = all((killed / f"{step}.jsonl").is_file() for step in range(1, killed_after))
    return {
        "killed_s_after_step_1": round(delay, 2),
        "killed_after_step": killed_after,
        **ended,
        "resumed_from": checkpoint,
        "exit_code": code,
        "ranks_verified": sorted(verified),
        "parts": [parts for _, (parts, _) in sorted(verified.items())],
        "steps_with_equal_prompts": again if same_prompts else [],
        "last_step": logged_steps(run_dir),
        "ok": code == 0
        and ended.get("ended", True)
        and sorted(verified) == list(range(args.ranks if checkpoint else 0))
        and dumped
        and same_prompts
        and logged_steps(run_dir) == last_checkpoint(run_dir) == LAST,
    }


def prompts_by_step(runs: Path) -> dict[int, dict[str, list[str]]]:
    """step -> run -> its prompts, for everything that the runs in `runs` wrote down."""
    found: dict[int, dict[str, list[str]]] = {}
    for file in sorted(runs.glob("*/*.jsonl")):
        if file.stem.isdecimal() and file.parent.suffix in (".killed", ".resumed"):
            found.setdefault(int(file.stem), {})[file.parent.name] = prompts_of_step(file.parent, int(file.stem))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0, help="kill at most this long after step 1")
    parser.add_argument("--signal", default="SIGKILL", choices=("SIGKILL", "SIGINT", "SIGTERM"))
    parser.add_argument("--runs", default="runs/verl_resume_check")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its runs
    Path(args.runs).mkdir(parents=True, exist_ok=True)
    random.seed(args.seed)
    delays = [random.uniform(0.0, args.seconds) for _ in range(args.kills)]
    results: list[dict[str, Any]] = []
    for number, delay in enumerate(delays):
        results.append(check(f"kill{number}", args, delay))
        print(json.dumps(results[-1]), flush=True)
        steps = prompts_by_step(Path(args.runs))
        equal = all(len({tuple(prompts) for prompts in runs.values()}) == 1 for runs in steps.values())
        report = {
            "date": str(datetime.date.today()),
            "commit": COMMIT,
            "signal": args.signal,
            "ranks": args.ranks,
            "kills": results,
            "runs_compared_by_step": {step: len(runs) for step, runs in sorted(steps.items())},
            "ok": equal and all(result["ok"] for result in results),
        }
        if args.output:
            write_json(args.output, report)
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
