"""Digests of ten training steps in each scheme, level and backend, to compare two commits bit by bit.

    python scripts/golden.py before.json                      ten steps of each case; some ten minutes on two cores
    python scripts/golden.py after.json --against before.json  the same, then a table of what differs
    python scripts/golden.py one.json --only w4a16,lora       some cases

A digest covers the exported weights, and the metrics of every step but for seconds, rates and memory. They are equal
only on one machine: another CPU may sum in another order. A change that should alter no number is right if every
digest is equal before and after it; what a change does alter is seen in the cases that differ. Two runs of verl on one
commit differ already, because its rollouts arrive in an order of their own: compare their steps by eye.

Run it in a checkout whose models `make model` and `make model-moe` have written. A case whose model is missing is
an error, so that a shorter table is never taken for a whole one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 10
SMALL = (
    "data.train_batch_size=6",
    "actor.ppo_mini_batch_size=3",
    "rollout.n=4",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.log_prob_micro_batch_size_per_gpu=8",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=5",
    "trainer.val_max_prompts=32",
    "trainer.logger=[console]",
)
CASES: dict[str, tuple[str, ...]] = {
    "bf16": ("config=configs/quickstart.yaml", "quant.scheme=bf16"),
    "w4a16": ("config=configs/quickstart.yaml",),
    "w4a16 off": ("config=configs/quickstart.yaml", "quant.align=off"),
    "w4a16 linears": ("config=configs/quickstart.yaml", "quant.align=linears"),
    "w4a16 exact muon": (
        "config=configs/quickstart.yaml",
        "quant.align=exact",
        "optim.name=muon",
    ),
    "w4a16 dequantized": ("config=configs/quickstart.yaml", "quant.kernels=dequantized"),
    "w4a8": ("config=configs/quickstart.yaml", "quant.scheme=w4a8", "quant.kernels=qarl"),
    "w8a8": ("config=configs/quickstart.yaml", "quant.scheme=w8a8"),
    "w8a8 off": ("config=configs/quickstart.yaml", "quant.scheme=w8a8", "quant.align=off"),
    "fp8": ("config=configs/quickstart.yaml", "quant.scheme=fp8"),
    "lora": ("config=configs/quickstart_lora.yaml",),
    "experts": ("config=configs/quickstart_moe.yaml",),
    "experts w8a8": ("config=configs/quickstart_moe.yaml", "quant.scheme=w8a8"),
    "verl": ("config=configs/quickstart_verl.yaml",),
    "verl w8a8": ("config=configs/quickstart_verl.yaml", "quant.scheme=w8a8"),
    "verl lora": ("config=configs/quickstart_verl.yaml", "lora.r=8"),
}
"""name -> arguments of `qarl train`, after which come those of `SMALL`."""

CHANGING = re.compile(r"_s$|seconds|timing|time|per_s|throughput|^perf|memory|mfu", re.I)
"""Metrics that a second run does not repeat."""


def digest_of_weights(folder: Path) -> str:
    """Return the SHA-256 of all safetensors files in `folder`, in order of their names."""
    total = hashlib.sha256()
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise SystemExit(f"error: {folder} holds no weights")
    for file in files:
        total.update(file.name.encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that a second run repeats."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not CHANGING.search(k)} for row in rows]


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a case in `folder`, and return its digests and metrics."""
    arguments = [*CASES[name], *SMALL, f"output_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "qarl.train", *arguments]
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        done = subprocess.run(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise SystemExit(f"error: the case {name!r} failed:\n{tail}")
    (metrics,) = folder.rglob("metrics.jsonl")
    rows = metrics_of(metrics)
    return {
        "weights": digest_of_weights(metrics.parent / "export"),
        "metrics": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16],
        "rows": rows,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each case, which says what differs."""
    lines = []
    for name in before.keys() | after.keys():
        if name not in before or name not in after:
            lines.append(f"{name}: only on one side")
            continue
        old = before[name]
        new = after[name]
        parts = []
        if old["weights"] != new["weights"]:
            parts.append("weights")
        for key in _keys(old) | _keys(new):
            if [row.get(key) for row in old["rows"]] != [row.get(key) for row in new["rows"]]:
                parts.append(key)
        lines.append(f"{name}: {', '.join(sorted(parts)) or 'equal'}")
    return sorted(lines)


def _keys(case: dict[str, Any]) -> set[str]:
    return {key for row in case["rows"] for key in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier output to compare with")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    arguments = parser.parse_args()
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(arguments.only.split(",")):
            results[name] = run(name, Path(scratch) / str(number))
            print(f"{name}: weights {results[name]['weights']}, metrics {results[name]['metrics']}")
            arguments.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        chosen = {name: before[name] for name in results if name in before}
        print("\n".join(differences(chosen, results)))


if __name__ == "__main__":
    main()
