"""The mismatch by rotary embedding and by model family: mean and largest |δ| at every level, against a real vLLM.

    python scripts/config_mismatch.py rotary   --output benchmarks/results/rotary_cpu.json
    python scripts/config_mismatch.py families --output benchmarks/results/families_cpu.json

Random models of two layers, `--responses` rows of `--tokens` tokens at temperature 1 after prompts of 40. A config that
is refused is written down with the reason, and so is a level that falls back. --unchecked runs what would be refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.json_file import write_json
from qarl.checks.model import check_model
from qarl.errors import UserError
from qarl.quant import get_scheme
from qarl.rollout.engine import EngineConfig, RolloutEngine, SamplingConfig
from qarl.trainer.batch import make_batch
from qarl.trainer.policy import Policy

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "tiny-qwen3"
LEVELS = ("off", "linears", "model", "exact")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "yarn, attention_factor": YARN | {"attention_factor": 1.0},
}
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "granite", "gemma", "gemma2", "gemma3_text", "cohere", "seed_oss"),
    *("ernie4_5", "arcee", "stablelm", "nemotron", "exaone4", "ministral3", "apertus", "cwm", "opt", "phi", "gpt2"),
)


def small_config(model_type: str, **keys: Any) -> Any:
    """A config of `model_type` with those of `SIZES` that the family has."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    sizes = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    return CONFIG_MAPPING[model_type](**sizes, **keys)


def save_model(config: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config.initializer_range = 0.08
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in TOKENIZER.glob("tokenizer*"):  # vLLM asks for one, though prompts are given as tokens
        shutil.copy(file, folder)


def policy(folder: Path, scheme: str, level: str) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return Policy(model, get_scheme(scheme, group_size=32), ("lm_head",), align=level)


@torch.no_grad()
def measure(config: Any, scheme: str, responses: int, tokens: int, *, checked: bool = True) -> dict[str, Any]:
    """Of each level mean and largest |δ| and the level that applied; or why the config is refused."""
    config.architectures = None
    try:
        if checked:
            check_model(config)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent)
            save_model(config, folder)
            return _levels(folder, scheme, responses, tokens)
    except UserError as error:
        return {"refused": " ".join(str(error).split())}


def _levels(folder: Path, scheme: str, responses: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 256, (40 - i % 7,), generator=generator).tolist() for i in range(responses)]
    settings = EngineConfig(str(folder), get_scheme(scheme, group_size=32), ("lm_head",), 40 + tokens, kv_cache_gib=0.1)
    with RolloutEngine(settings) as engine:
        engine.publish(policy(folder, scheme, "linears").quantize(), version=1)
        rollout = engine.generate(prompts, SamplingConfig(tokens, ignore_eos=True), seeds=list(range(responses)))
    batch = make_batch(rollout, torch.zeros(responses), torch.zeros(responses), pad_token_id=0)
    found: dict[str, Any] = {}
    for level in LEVELS:
        trainer = policy(folder, scheme, level)
        parts = [trainer.response_log_probs(batch, rows, temperature=1.0) for rows in batch.micro_batches(8)]
        delta = (torch.cat(parts) - batch.rollout_log_probs)[batch.response_mask].abs()
        found[level] = {"mean": float(delta.mean()), "max": float(delta.max()), "applied": trainer.align}
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = ["| config | scheme | " + " | ".join(f"`{level}`" for level in LEVELS) + " |", "|---" * 6 + "|"]
    for key, found in results.items():
        name, _, scheme = key.rpartition(" ")
        cells = [f"refused: {found['refused'][:90]}"] + [""] * 3 if "refused" in found else []
        for level in LEVELS if not cells else ():
            cell, applied = found[level], found[level]["applied"]
            figures = f"{cell['mean']:.1e} ({cell['max']:.1g})" if cell["max"] else "0"
            cells.append(figures if applied == level else f"is `{applied}`")
        rows.append("| " + " | ".join([name, scheme, *cells]) + " |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rotary", "families"))
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "bf16"])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for name in args.only or (ROTARY if args.what == "rotary" else FAMILIES):
        for scheme in args.schemes:
            rope = {"rope_parameters": {"rope_theta": 10000.0} | ROTARY[name]} if args.what == "rotary" else {}
            config = small_config("llama" if args.what == "rotary" else name, **rope)
            try:
                found = measure(config, scheme, args.responses, args.tokens, checked=not args.unchecked)
            except Exception as error:  # a family may fail anywhere: that is the finding
                found = {"refused": f"NOT REFUSED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            results[f"{name} {scheme}"] = found
            print(name, scheme, json.dumps(found), flush=True)
            if args.output:
                write_json(args.output, results)
    print(table(results))


if __name__ == "__main__":
    main()
