"""Whole verl runs with delta publishes: what each publish sent, and what it left in every engine.

    python scripts/verl_delta_check.py --output benchmarks/results/verl_delta_cpu.json

Each run trains a tiny model on two CPU ranks. The dense model has two engines. The mixture of experts has one engine of
two workers, as the 30B config has. `scripts/watched_worker.py` checks every worker after every publish. Here its
findings are compared: with the metrics that the run logged, among the workers, and with the export of the last step.
Exit code 1 if an engine differs from a full publish, if a publish after the first sends all tensors, or if the workers
or the export differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.compressed_tensors import read_tensors
from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import read_metrics, write_versions
from qarl.rollout.publish.checksum import checksums

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6
MIXTURE = {"quant.align": "linears", "rollout.tensor_model_parallel_size": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("quickstart_verl.yaml", {"optim.lr": 1e-6}),
    "dense, lr of the quickstart": ("quickstart_verl.yaml", {}),
    "experts, two workers": ("quickstart_moe.yaml", {"optim.lr": 1e-6} | MIXTURE),
}
"""By name the config and what is changed in it."""
SETTINGS = {
    "backend": "verl",
    "trainer.n_gpus_per_node": 2,
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": "false",
    "trainer.test_freq": -1,
    "trainer.plots": "false",
    "trainer.logger": "[console]",
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_gpu": 8,
    "actor.log_prob_micro_batch_size_per_gpu": 16,
    "publish.delta": "auto",
}
WATCHED = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "watched_worker.WatchedWorker"}


def run(config: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, and return what the run logged and what its workers found. Raise SystemExit if the run fails."""
    watch = folder / "watch"
    watch.mkdir()
    values = yaml.safe_load((ROOT / "configs" / config).read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump(values | {"name": "run", "verl": WATCHED}))
    given = [f"{key}={value}" for key, value in (SETTINGS | settings | {"output_dir": folder}).items()]
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"QARL_WATCH": str(watch), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "qarl.train", f"config={folder / 'run.yaml'}", *given]
    with (folder / "log").open("wb") as log:
        code = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit((folder / "log").read_text(errors="replace")[-4000:])
    workers = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(watch.iterdir())]
    summary = json.loads((folder / "run/summary.json").read_text())
    exported = dict(read_tensors(Path(summary["checkpoint"])))
    digests = {
        name: f"{digest & (2**64 - 1):016x}"
        for name, digest in zip(exported, checksums(exported.values()), strict=True)
    }
    steps = [one for one in read_metrics(folder / "run") if one["step"] > 0]
    return {"steps": steps, "workers": workers, "export": digests}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one run."""
    workers, steps = found["workers"], found["steps"]
    last = [worker[-1]["digests"] for worker in workers]
    export = found["export"]
    row = {
        "workers": len(workers),
        "publishes": [[one["version"] for one in worker] for worker in workers],
        "deltas": [[one["delta"] for one in worker] for worker in workers],
        "tensors": len(last[0]),
        "damaged": sum(one["damaged"] for worker in workers for one in worker),
        "differ_from_full_publish": sum(one["differ"] for worker in workers for one in worker),
        "same_in_all_workers": all(
            [one["held"] for one in worker] == [one["held"] for one in workers[0]] for worker in workers
        ),
        "differ_from_export": max(
            len(one.keys() ^ export.keys()) + sum(one[n] != export[n] for n in one.keys() & export.keys())
            for one in last
        ),
        "steps": [
            {"step": one["step"]}
            | {name: value for name, value in one.items() if name.startswith("publish/")}
            | {"mismatch/abs_mean": one["mismatch/abs_mean"]}
            for one in steps
        ],
    }
    used = all(deltas == [False] + [True] * (len(deltas) - 1) and len(deltas) > STEPS - 1 for deltas in row["deltas"])
    logged = [one.get("publish/delta") for one in steps] == [0.0] + [1.0] * (STEPS - 1)
    row["ok"] = (
        used
        and logged
        and row["same_in_all_workers"]
        and not (row["damaged"] or row["differ_from_full_publish"] or row["differ_from_export"])
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        versions = json.loads(write_versions(folder).read_text())
        for number, name in enumerate(given.runs):
            config, changes = RUNS[name]
            here = Path(folder) / str(number)
            here.mkdir()
            start = time.monotonic()
            rows[name] = {"config": config, "changes": changes} | judged(run(config, changes, here))
            rows[name]["seconds"] = round(time.monotonic() - start, 1)
            print(name, json.dumps(rows[name]), flush=True)
            if given.output:
                content = {"date": datetime.date.today().isoformat(), "versions": versions, "runs": rows}
                write_json(given.output, content)
    return 0 if all(row["ok"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
