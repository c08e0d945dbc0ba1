"""The mismatch at long responses: mean and largest |δ| at levels `model` and `exact`, with what each costs.

    python scripts/long_responses.py --tokens 1000

The quickstart's model, its positions extended, continues past its end-of-text: `--responses` rows of `--tokens` tokens
at temperature 1. Cells: mean |δ|, largest |δ|, share of tokens with δ other than 0, and seconds of one forward over
all rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.policy import Policy

LEVELS = ("off", "linears", "model", "exact")


def extended(model: str, folder: Path, positions: int) -> Path:
    """A copy of `model` that allows `positions` tokens."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, scheme: str, level: str) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return Policy(model, get_scheme(scheme, group_size=32), ("lm_head",), align=level)


def sample(folder: Path, scheme: str, responses: int, tokens: int) -> tuple[Batch, float]:
    """The batch, and the seconds the engine took."""
    prompts = [[3 + (i * 7 + t) % 200 for t in range(8 + i % 5)] for i in range(responses)]
    length = max(map(len, prompts)) + tokens
    config = EngineConfig(str(folder), get_scheme(scheme, group_size=32), ("lm_head",), length, kv_cache_gib=0.5)
    with RolloutEngine(config) as engine:
        engine.publish(load(folder, scheme, "linears").quantize(), version=1)
        start = time.perf_counter()
        rollout = engine.generate(prompts, SamplingConfig(tokens, ignore_eos=True), seeds=list(range(responses)))
        seconds = time.perf_counter() - start
    zeros = torch.zeros(responses)
    return make_batch(rollout, zeros, zeros, pad_token_id=0), seconds


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-qwen3")
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8", "fp8", "bf16"])
    parser.add_argument("--responses", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| scheme | rollout s | " + " | ".join(f"`{level}`" for level in LEVELS) + " |")
    print("|---" * (len(LEVELS) + 2) + "|")
    with tempfile.TemporaryDirectory() as parent:
        folder = extended(args.model, Path(parent) / "model", args.tokens + 64)
        for scheme in args.schemes:
            batch, rollout_seconds = sample(folder, scheme, args.responses, args.tokens)
            cells = [scheme, f"{rollout_seconds:.1f}"]
            for level in LEVELS:
                policy = load(folder, scheme, level)
                start = time.perf_counter()
                parts = [policy.response_log_probs(batch, rows, temperature=1.0) for rows in batch.micro_batches(4)]
                seconds = time.perf_counter() - start
                delta = (torch.cat(parts) - batch.rollout_log_probs)[batch.response_mask].abs()
                differ = float((delta > 0).float().mean())
                cells.append(f"{delta.mean():.1e} / {delta.max():.1e} / {differ:.1%} / {seconds:.1f} s")
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
