"""Kill a run with SIGKILL at random moments, resume it each time, and compare it with one that was left alone.

    python scripts/kill_and_resume.py --output result.json
    python scripts/kill_and_resume.py --kills 3 optim.master_dtype=bf16 optim.name=muon

Two runs of one config, here the quickstart, with a checkpoint every two steps: the reference without interruption, and
one that is killed by process id `--kills` times, in its start-up, in a step or in a checkpoint, as it falls. Compared
bit by bit: every metric of every step except seconds, and by digest weights, published tensors, optimizer state and
the exported model. The result is JSON; the exit code is 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.checkpoint.folder import Checkpoint, list_checkpoints, open_checkpoint
from qarl.checkpoint.run_folder import METRICS_FILE
from qarl.checkpoint.storage import file_sha256
from qarl.metrics.tracker import read_metrics

# Seconds, and what only one of two equal runs has.
NOT_COMPARED = ("timing_s/", "startup/", "resume/", "checkpoint/")


def command(name: str, args: argparse.Namespace) -> list[str]:
    settings = {
        "name": name,
        "output_dir": args.runs,
        "trainer.total_training_steps": args.steps,
        "trainer.save_freq": args.save_freq,
        "trainer.test_freq": 4,
        "trainer.val_max_prompts": 64,
        "trainer.plots": "false",
        "trainer.logger": "[console]",
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "qarl.train", f"config={args.config}", *given, *args.overrides]


def run(name: str, args: argparse.Namespace) -> float:
    """Run to the end; seconds it took. Its output goes to the log beside the runs."""
    start = time.monotonic()
    with (Path(args.runs) / f"{name}.log").open("ab") as log:
        code = subprocess.run(command(name, args), stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{name}: exit code {code}, see {args.runs}/{name}.log")
    return time.monotonic() - start


def run_and_kill(args: argparse.Namespace, moment: float, startup: float, step: float) -> dict[str, Any]:
    """Start or resume the run `killed`, and kill it at `moment`: 4.3 is 30% of a step after step 4 was logged.

    If that step was logged before, or is 0, the kill comes in the start-up, that part of the way through it.
    """
    run_dir = Path(args.runs) / "killed"
    steps, fraction = divmod(moment, 1)
    in_startup = logged_step(run_dir) >= steps
    with (Path(args.runs) / "killed.log").open("ab") as log:
        process = subprocess.Popen(command("killed", args), stdout=log, stderr=subprocess.STDOUT)
        if not in_startup:
            wait(process, lambda: logged_step(run_dir) >= steps, 600)
        wait(process, lambda: False, fraction * (startup if in_startup else step))
        alive = process.poll() is None
        if alive:
            os.kill(process.pid, signal.SIGKILL)
        code = process.wait()
    folder = run_dir / "checkpoints"
    whole = [open_checkpoint(path).step for _, path in list_checkpoints(folder)]
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {
        "moment": round(moment, 3),
        "in_startup": in_startup,
        "killed": alive,
        "exit_code": code,
        "logged_step": logged_step(run_dir),
        "whole_checkpoints": whole,
        "left_over": [name for name in names if ".partial-" in name or ".old-" in name],
    }


def logged_step(run_dir: Path) -> int:
    """The step of the last whole line of the metrics."""
    path = run_dir / METRICS_FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait(process: subprocess.Popen[bytes], ready: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and not ready():
        time.sleep(0.01)


def compared(metrics: dict[str, Any]) -> dict[str, str]:
    """The values that must be equal, in hexadecimal: NaN equals NaN, and 0.0 is not -0.0."""
    return {
        name: float(value).hex()
        for name, value in metrics.items()
        if not name.startswith(NOT_COMPARED) and not (name.startswith("publish/") and name.endswith("_s"))
    }


def differences(args: argparse.Namespace) -> tuple[list[str], int]:
    """The differences between the runs, and how many values were compared."""
    runs = [Path(args.runs) / name for name in ("reference", "killed")]
    reference, killed = ({int(m["step"]): compared(m) for m in read_metrics(run)} for run in runs)
    found = [f"step {step}: only one run has it" for step in reference.keys() ^ killed.keys()]
    for step in sorted(reference.keys() & killed.keys()):
        a, b = reference[step], killed[step]
        names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        found += [f"step {step}, {name}: {a.get(name)} {b.get(name)}" for name in names]
    first, second = (open_checkpoint(run / "checkpoints" / f"step_{args.steps}") for run in runs)
    found += [f"{part} differ" for part, a, b in zip(PARTS, digests(first), digests(second), strict=True) if a != b]
    exports = [file_sha256(run / "export" / "model.safetensors") for run in runs]
    if exports[0] != exports[1]:
        found.append("the exported models differ")
    return found, sum(map(len, reference.values()))


PARTS = ("weights", "published tensors", "data position", "model.safetensors", "optimizer.pt", "rng.pt")


def digests(checkpoint: Checkpoint) -> list[Any]:
    state, files = checkpoint.state, checkpoint.state["files"]
    return [state["weights"], state["published"], state["sampler"], *(files[name]["sha256"] for name in PARTS[3:])]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart.yaml")
    parser.add_argument("--runs", default="runs/kill_and_resume", help="folder for both runs; must not exist")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-freq", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, for both runs")
    args = parser.parse_args(argv)
    Path(args.runs).mkdir(parents=True)
    run("reference", args)
    summary = json.loads((Path(args.runs) / "reference" / "summary.json").read_text())
    startup, step = summary["seconds_to_first_step"], summary["seconds_per_step"]
    chance = random.Random(args.seed)
    kills: list[dict[str, Any]] = []
    for moment in sorted(chance.uniform(0, args.steps - 1) for _ in range(args.kills)):
        kills.append(run_and_kill(args, moment, startup, step))
        print(json.dumps(kills[-1]), file=sys.stderr, flush=True)
    run("killed", args)
    found, values = differences(args)
    result = {
        "config": args.config,
        "overrides": args.overrides,
        "steps": args.steps,
        "seed": args.seed,
        "kills": kills,
        "compared_values": values,
        "differences": found,
        "equal": not found and sum(kill["killed"] for kill in kills) == args.kills,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
