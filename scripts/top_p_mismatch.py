"""Top-p and top-k on both sides: mean and largest |δ| at `model` and `exact`, and r at learning rate 0.

    python scripts/top_p_mismatch.py --output benchmarks/results/top_p_cpu.json

Two models of the quickstart's shape: its trained one, whose nucleus is a token or two, and a random one, whose
nucleus is a hundred of 288. For each a batch of 96 responses is sampled, the kept sets are found in the pass for the
old log-probs, and two epochs of two mini-batches are trained at learning rate 0.

    outside   sampled tokens that were not in the trainer's own set: they are kept all the same
    plain     mean |δ| of the trainer's log-probs over all tokens, as they would be without the kept sets
    r         largest |r - 1| of a response in the update, and largest change of a token's log-prob

Exit code 1 if a log-prob is not finite, r is not 1, or δ is not 0 at `exact`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qarl.config import load_config
from qarl.metrics.guard import resolve_limit
from qarl.metrics.mismatch import mismatch_metrics
from qarl.metrics.tracker import write_json
from qarl.trainer.local import LocalTrainer
from qarl.trainer.setup import prepare_run

TINY = Path("models/tiny-qwen3")
KINDS: dict[str, dict[str, float]] = {
    "all tokens": {},
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.5, temperature 0.7": {"top_p": 0.5, "temperature": 0.7},
    "top_p 0.9, temperature 0.7": {"top_p": 0.9, "temperature": 0.7},
    "top_k 20, temperature 0.7": {"top_k": 20, "temperature": 0.7},
    "top_p 0.9, top_k 20, temperature 0.7": {"top_p": 0.9, "top_k": 20, "temperature": 0.7},
}
MODELS = ("trained", "random")


def random_model(folder: Path) -> Path:
    """The quickstart's model with random weights, which leave broad distributions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY)
    config.initializer_range = 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in (*TINY.glob("token*"), TINY / "chat_template.jinja", TINY / "generation_config.json"):
        shutil.copy(file, folder)
    return folder


def start(folder: Path, model: Path, scheme: str, level: str) -> LocalTrainer:
    arguments = ["config=quickstart.yaml", f"output_dir={folder}", f"model.path={model}"]
    arguments += [f"quant.scheme={scheme}", f"quant.align={level}", "optim.lr=0", "actor.ppo_epochs=2"]
    arguments += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[]"]
    config = load_config(arguments)
    return LocalTrainer(config, prepare_run(config))


def measure(trainer: LocalTrainer, kind: str) -> dict[str, Any]:
    """One batch and its update, sampled as `kind` says."""
    config = trainer.config
    trainer.config = config.model_copy(update={"rollout": config.rollout.model_copy(update=KINDS[kind])})
    temperature = trainer.config.rollout.temperature
    try:
        batch, _ = trainer.rollout()
        old = trainer.old_log_probs(batch)
        update = trainer.update(batch, old)
        with torch.no_grad():
            rows = batch.micro_batches(40)
            again = torch.cat([trainer.policy.response_log_probs(batch, one, temperature=temperature) for one in rows])
            everything = replace(batch, sampling_mask=None)
            plain = torch.cat(
                [trainer.policy.response_log_probs(everything, one, temperature=temperature) for one in rows]
            )
    finally:
        trainer.config = config
    mask, length = batch.response_mask, float(batch.response_mask.sum(1).float().mean())
    metrics = mismatch_metrics(old, batch.rollout_log_probs, mask)
    kept = batch.sampling_mask
    return {
        "tokens": int(mask.sum()),
        "mean": metrics["mismatch/abs_mean"],
        "max": metrics["mismatch/abs_max"],
        "limit": resolve_limit(None, trainer.policy.align, response_length=length, temperature=temperature),
        "kept_mean": None if kept is None else float(sum((kept[mask] >> i & 1).sum() for i in range(8)) / mask.sum()),
        "outside": 0 if batch.outside is None else int(batch.outside.sum()),
        "finite": bool(old.isfinite().all() and again.isfinite().all()),
        "plain_mean": mismatch_metrics(plain, batch.rollout_log_probs, mask)["mismatch/abs_mean"],
        "ratio_abs_dev_max": update["actor/seq_ratio_abs_dev_max"],
        "token_change_max": float((again - old).abs().max()),
    }


def cases(models: Sequence[str], schemes: Sequence[str], levels: Sequence[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = {"trained": TINY, "random": random_model(Path(folder) / "random")}
        for name in models:
            for scheme in schemes:
                for level in levels:
                    trainer = start(Path(folder) / "runs", paths[name], scheme, level)
                    with trainer.engine:
                        trainer.publish()
                        for kind in KINDS:
                            found = measure(trainer, kind)
                            yield {"model": name, "scheme": scheme, "level": trainer.policy.align, "kind": kind} | found


def failed(row: dict[str, Any]) -> bool:
    moved = row["ratio_abs_dev_max"] or row["token_change_max"]
    return bool(not row["finite"] or moved or (row["level"] == "exact" and row["max"]) or row["mean"] > row["limit"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w4a16", "w8a8"])
    parser.add_argument("--levels", nargs="+", choices=("model", "exact"), default=["model", "exact"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print("| model | scheme | level | sampling | kept | mean |δ| | max | plain | outside | tokens | r | |")
    print("|---" * 12 + "|")
    for row in cases(args.models, args.schemes, args.levels):
        rows.append(row)
        kept = "all" if row["kept_mean"] is None else f"{row['kept_mean']:.1f}"
        print(
            f"| {row['model']} | {row['scheme']} | `{row['level']}` | {row['kind']} | {kept} | {row['mean']:.1e} | "
            f"{row['max']:.2g} | {row['plain_mean']:.1e} | {row['outside']} | {row['tokens']} | "
            f"{row['ratio_abs_dev_max']:.2g}, {row['token_change_max']:.2g} | {'FAIL' if failed(row) else 'ok'} |",
            flush=True,
        )
        if args.output:
            write_json(args.output, {"amx_tiles": torch.cpu._is_amx_tile_supported(), "rows": rows})
    return int(any(map(failed, rows)))


if __name__ == "__main__":
    sys.exit(main())
