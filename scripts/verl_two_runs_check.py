"""Two whole verl runs on one host at once, of two models that only their weights tell apart.

    python scripts/verl_two_runs_check.py --output benchmarks/results/verl_two_runs_cpu.json

Both start a Ray, so verl gives both one socket for their publishes. The second run's model is the first one's with
fresh random weights: an engine that got the other run's weights would take them, and its log-probs would be those of
the other model. Checked: both runs end well, and no token of any step has a δ between trainer and engine, which is what
quant.align=exact promises (with AMX tiles, see docs/alignment.md). `other_model_abs_mean` says what the other's weights
would give.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import read_metrics


def random_twin(model: Path, folder: Path) -> Path:
    """The model's config and tokenizer with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder, dirs_exist_ok=True)
    torch.manual_seed(1)
    twin = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    twin.save_pretrained(folder)
    return folder


def other_model_abs_mean(models: list[Path]) -> float:
    """Mean |difference| of the two models' log-probs of random tokens."""
    from transformers import AutoModelForCausalLM

    log_probs = []
    for model in models:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokens = torch.randint(3, loaded.config.vocab_size, (16, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits = loaded(tokens).logits[:, :-1]
        log_probs.append(logits.log_softmax(-1).gather(2, tokens[:, 1:, None]))
    return float((log_probs[0] - log_probs[1]).abs().mean())


def start(name: str, model: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    settings = {
        "name": name,
        "output_dir": args.root,
        "model.path": model,
        "quant.align": "exact",
        "trainer.total_training_steps": args.steps,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.save_final": "false",
        "trainer.plots": "false",
        "trainer.logger": "[console]",
        "trainer.resume_mode": "disable",
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "qarl.train", "config=quickstart_verl.yaml", *given, *args.overrides]
    with (args.root / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def result(name: str, code: int, args: argparse.Namespace) -> dict[str, Any]:
    steps = [entry for entry in read_metrics(args.root / name) if "mismatch/abs_max" in entry] if code == 0 else []
    largest = max((entry["mismatch/abs_max"] for entry in steps), default=None)
    return {
        "exit_code": code,
        "steps": len(steps),
        "largest_abs_delta": largest,
        "publish_seconds": [round(entry["timing_s/publish"], 3) for entry in steps],
        "ok": code == 0 and len(steps) == args.steps and largest == 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-qwen3"))
    parser.add_argument("--root", type=Path, default=Path("runs/verl_two_runs_check"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.root = args.root.resolve()
    args.root.mkdir(parents=True, exist_ok=True)
    models = [args.model.resolve(), random_twin(args.model, args.root / "twin")]
    names = ("first", "second")
    runs = [start(name, model, args) for name, model in zip(names, models, strict=True)]
    found = {name: result(name, run.wait(), args) for name, run in zip(names, runs, strict=True)}
    apart = other_model_abs_mean(models)
    ok = all(one["ok"] for one in found.values()) and apart > 1
    amx = torch.cpu._is_amx_tile_supported()
    report = {"amx_tiles": amx, "runs": found, "other_model_abs_mean": apart, "ok": ok}
    print(json.dumps(report))
    if args.output:
        write_json(args.output, report)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
