"""How far BF16 weights move at learning rate 1e-6, with and without stochastic rounding, in verl's FSDP2 engine.

    OMP_NUM_THREADS=1 python scripts/rounding_displacement.py --output result.json

Each row trains one small random model for 200 steps on the same responses, on two gloo ranks: with FP32 masters, with
BF16 masters and stochastic rounding, and with BF16 masters rounded to nearest. The ranks run QaRL's engine class for
verl through verl's `train_batch` and `optimizer_step`, without Ray and without a rollout. To nearest is verl's own
AdamW on a BF16 model, and QaRL's Muon with its rounding replaced. Muon's rate is 1e-6 * sqrt(128), so that an element
moves about as far as with AdamW at 1e-6; docs/paper_runs.md says why.

A displacement d is the final weights minus the first ones. `projection` is <d, d32> / <d32, d32> with d32 the
displacement of the FP32 masters: 1 means that BF16 weights learn as much as FP32 weights, 0 that they stand still.
`cosine` and `moved` (share of the weights that changed) say how.
"""

# The rank programs of the tests are imported from their folder.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fsdp_ranks import BANDS, QUANT, make_rows, run_engine
from random_models import save_random_model
from transformers import AutoModelForCausalLM

from qarl.checkpoint.json_file import write_json
from qarl.metrics.tracker import write_versions

RANKS, LR, SECONDS = 2, 1e-6, 3000
OURS = {"optimizer_impl": "qarl.optim.optimizer", "optimizer": "MuonAdamW"}
WIDE = {"seq_clip_ratio_high": 10.0, "neg_seq_clip_ratio_low": 1.0, "neg_seq_clip_ratio_high": 10.0}


def jobs(name: str, steps: int) -> dict[str, dict[str, Any]]:
    """The runs of one optimizer. Bands are wide, because a run whose responses leave them stops learning."""
    # Muon's rate moves an element of these matrices of 128 inputs about as far as AdamW's.
    muon = {"muon_lr": LR * 128**0.5, "muon_momentum": 0.95} if name == "muon" else {}
    ours: dict[str, Any] = {"optim": OURS | {"override_optimizer_config": {"seed": 1, **muon}}}
    torchs: dict[str, Any] = {"optim": {}}
    runs = {
        "fp32": ours | {"engine": {"model_dtype": "fp32"}},
        "bf16, stochastic": ours | {"engine": {"model_dtype": "bf16"}},
    }
    nearest: dict[str, Any] = torchs if name == "adamw" else ours | {"to_nearest": True}
    runs["bf16, to nearest"] = nearest | {"engine": {"model_dtype": "bf16"}}
    same = {"quant": QUANT, "bands": BANDS | WIDE, "lr": LR, "micro": 4, "steps": steps}
    return {kind: same | run for kind, run in runs.items()}


def displacement(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    return torch.cat([(end[name].double() - start[name].double()).flatten() for name in names])


def compare(exact: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    return {
        "projection": float(found @ exact / (exact @ exact)),
        "cosine": float(found @ exact / (exact.norm() * found.norm()).clamp(min=1e-30)),
        "moved": float((found != 0).double().mean()),
    }


def measure(name: str, family: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    model = str(save_random_model(folder, family))
    start = {
        n: p.detach() for n, p in AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters()
    }
    runs = jobs(name, steps)
    found = run_engine(folder, RANKS, model, make_rows(model), list(runs.values()), timeout=SECONDS)
    results = dict(zip(runs, found, strict=True))
    ends = {kind: {n: tensor.float() for n, tensor in found["masters"].items()} for kind, found in results.items()}
    # Routers and biases of these models are larger than real ones; the matrices are as transformers initialises them.
    names = [n for n in start if n.endswith("proj.weight") or ".experts." in n]
    exact = displacement(start, ends["fp32"], names)
    rms = float(exact.square().mean().sqrt())
    return [
        {"optimizer": name, "family": family, "masters": kind, "rms_fp32": rms}
        | compare(exact, displacement(start, end, names))
        for kind, end in ends.items()
        if kind != "fp32"
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--families", nargs="+", default=["qwen3", "qwen3_moe"])
    given = parser.parse_args(arguments)
    begun, rows = time.time(), []
    for family in given.families:
        for name in ("adamw", "muon"):
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(name, family, given.steps, Path(folder)):
                    rows.append(row)
                    print(row, flush=True)
    good = all(0.9 <= r["projection"] <= 1.1 if "stoch" in r["masters"] else r["projection"] < 0.5 for r in rows)
    if given.output:
        with tempfile.TemporaryDirectory() as folder:
            versions = json.loads(write_versions(folder).read_text())
        result = {"lr": LR, "steps": given.steps, "ranks": RANKS, "seconds": round(time.time() - begun), "rows": rows}
        write_json(given.output, result | {"versions": versions, "within_bounds": good})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
