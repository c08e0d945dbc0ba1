"""Whether warning signs come before a collapse, and only then.

    python scripts/warning_signs.py                    three seeds of a run that collapses and of a healthy one
    python scripts/warning_signs.py --runs collapse --seeds 0 --steps 60
    python scripts/warning_signs.py --history RUN...   no training: the signs in the metrics of finished runs

Both kinds of run are the quickstart. `collapse` has `quant.align=off` and a learning rate that grows through its
warm-up to several times what the task bears; `healthy` is the quickstart as it is. A reward has fallen at the first
step at which the mean of the last five steps is below half of the best such mean before. The table says when that was,
and when the first warning came and which it was. The exit code is 1 if a collapse came without an earlier warning, if
it did not come, or if a healthy run gave a warning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import read_metrics
from qarl.metrics.warning_signs import find

KINDS: dict[str, list[str]] = {
    "collapse": [
        "quant.align=off",
        "optim.lr=2e-3",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps=200",
    ],
    "healthy": [],
}
QUIET = [
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.val_max_prompts=16",
    "trainer.plots=false",
    "trainer.save_final=false",
    "trainer.logger=[console]",
]
SMOOTH = 5
REWARD = "critic/score/mean"


def fell_at(history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first step at which the reward, a mean of `SMOOTH` steps, is below half of its best value before."""
    steps = [(int(entry["step"]), float(entry[REWARD])) for entry in history if REWARD in entry]
    best = 0.0
    for end in range(SMOOTH, len(steps) + 1):
        mean = sum(value for _, value in steps[end - SMOOTH : end]) / SMOOTH
        if mean < best / 2:
            return steps[end - 1][0]
        best = max(best, mean)
    return None


def judged(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run shows: when its reward fell, its warnings, and its reward at both ends."""
    trained = [entry for entry in history if REWARD in entry]
    rewards = [float(entry[REWARD]) for entry in trained]
    return {
        "steps": len(trained),
        "reward_first_10": sum(rewards[:10]) / max(1, len(rewards[:10])),
        "reward_last_10": sum(rewards[-10:]) / max(1, len(rewards[-10:])),
        "reward_fell_at_step": fell_at(history),
        "warnings": [
            {"sign": one.sign, "step": one.step, "since_step": one.since_step, "text": one.text}
            for one in find(trained)
        ],
    }


def as_it_should(kind: str, result: Mapping[str, Any]) -> bool:
    if kind == "healthy":
        return not result["warnings"] and result["reward_fell_at_step"] is None
    fell, warnings = result["reward_fell_at_step"], result["warnings"]
    return fell is not None and bool(warnings) and warnings[0]["step"] < fell


def train(kind: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """Run one training in a process, unless it is finished, and return what it shows, and its seconds."""
    name = f"{kind}-seed{seed}"
    command = [sys.executable, "-m", "qarl.train", "config=quickstart.yaml", f"name={name}", f"seed={seed}"]
    command += [f"output_dir={output}", f"trainer.total_training_steps={steps}", *KINDS[kind], *QUIET]
    summary, record = output / name / "summary.json", output / f"{name}.json"
    if record.is_file() and json.loads(record.read_text())["arguments"] != command[1:]:
        sys.exit(f"error: {output / name} is a run with other arguments; choose another --runs-dir")
    write_json(record, {"arguments": command[1:]})
    if not summary.is_file() or not json.loads(summary.read_text())["finished"]:
        print(f"--- {' '.join(command[1:])}", flush=True)
        subprocess.run(command, check=True)
    return judged(read_metrics(output / name)) | {"seconds": json.loads(summary.read_text())["seconds"]}


def row(kind: str, seed: object, result: Mapping[str, Any]) -> str:
    warnings = ", ".join(f"{one['sign']} at {one['step']}" for one in result["warnings"]) or "none"
    ends = f"{result['reward_first_10']:.1%} | {result['reward_last_10']:.1%}"
    return f"| {kind} | {seed} | {result['steps']} | {ends} | {result['reward_fell_at_step'] or 'no'} | {warnings} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/warning_signs"))
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--history", type=Path, nargs="+", default=[], metavar="RUN")
    options = parser.parse_args(argv)
    print(
        "| run | seed | steps | reward, first 10 | last 10 | fell at step | warnings |\n|---|---|---|---|---|---|---|"
    )
    if options.history:
        finished = {folder.name: judged(read_metrics(folder)) for folder in options.history}
        for name, result in finished.items():
            print(row(name, "", result))
        if options.output:
            versions = json.loads((options.history[0] / "versions.json").read_text())
            write_json(options.output, {"what": "scripts/warning_signs.py", "versions": versions, "runs": finished})
        return 0
    results: dict[str, dict[str, Any]] = {kind: {} for kind in options.runs}
    good = True
    for seed in options.seeds:
        for kind in options.runs:
            result = train(kind, seed, options.steps, options.runs_dir)
            results[kind][str(seed)] = result
            good = good and as_it_should(kind, result)
            print(row(kind, seed, result), flush=True)
            if options.output:
                settings = {kind: [*KINDS[kind], f"trainer.total_training_steps={options.steps}"] for kind in results}
                versions = json.loads((options.runs_dir / f"{kind}-seed{seed}" / "versions.json").read_text())
                minutes = sum(run["seconds"] for kind in results.values() for run in kind.values()) / 60
                found = {"what": "scripts/warning_signs.py", "set": settings, "versions": versions}
                write_json(options.output, found | {"minutes": minutes, "runs": results})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
