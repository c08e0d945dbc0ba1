"""The mismatch of 30 training steps in verl on 1, 2 and 4 ranks, dense and a mixture of experts.

    python scripts/verl_ranks.py --output benchmarks/results/verl_ranks_cpu.json

Whole runs of the quickstart in verl with one seed: as many FSDP2 ranks as copies of the rollout engine, four prompts of
eight responses a step, the same micro-batches on any number of ranks. Reported are k3 and |δ| over the steps. verl does
not seed its requests, so the runs sample different responses; steps_on_ranks.py compares what fixed rows train. The
file keeps the runs that `--kinds` and `--ranks` leave out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_runs_check import Case, start

from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import write_versions

STEPS = 30
SMALL = {
    "trainer.total_training_steps": STEPS,
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "actor.log_prob_micro_batch_size_per_gpu": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"model.path": "models/tiny-qwen3-moe", "quant.ignore": r"[lm_head, 're:.*\.mlp\.gate$']"},
}


def measure(kind: str, ranks: int, root: Path) -> dict[str, Any]:
    begin = time.monotonic()
    case = Case(f"{kind}, {ranks} ranks", "model", SMALL | KINDS[kind] | {"trainer.n_gpus_per_node": ranks})
    code, text, steps = start(f"{kind}_{ranks}", case, root)
    found: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - begin), "steps": len(steps)}
    if code or not steps:
        return found | {"error": text[-2000:]}
    k3, mean, largest = ([step[f"mismatch/{name}"] for step in steps] for name in ("k3", "abs_mean", "abs_max"))
    found |= {"k3_mean": statistics.mean(k3), "k3_max": max(k3)}
    return found | {"abs_mean": statistics.mean(mean), "abs_max": max(largest)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--root", type=Path, default=Path("runs/verl_ranks"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    root = args.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        versions = json.loads(write_versions(folder).read_text())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else {}
    for kind in args.kinds:
        for ranks in args.ranks:
            runs.setdefault(kind, {})[str(ranks)] = measure(kind, ranks, root)
            print(kind, ranks, json.dumps(runs[kind][str(ranks)]), flush=True)
            write_json(args.output, {"date": date, "versions": versions, "setting": SMALL, "runs": runs})


if __name__ == "__main__":
    main()
