"""The mismatch between trainer and engine: by scheme and level, and by sampling."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.proofs.harness import (
    TINY,
    Record,
    Row,
    Run,
    local_trainer,
    log_probs,
)
from qarl.config.level import Level
from qarl.metrics.mismatch_limit import resolve_limit
from qarl.metrics.step_metrics import mismatch_metrics

PAPER_BANDS = {
    "actor.seq_clip_ratio_high": 4e-4,
    "actor.seq_clip_ratio_low": 3e-4,
    "actor.neg_seq_clip_ratio_low": 3e-4,
    "actor.neg_seq_clip_ratio_high": 7e-4,
}
ENDINGS: dict[str, Row] = {
    "own": {"rollout.router_replay": "off"},
    "qarl": {"quant.kernels": "qarl"},
    "dequantized": {"quant.kernels": "dequantized"},
    "paper": PAPER_BANDS,
    "r8": {"lora.r": 8, "optim.lr": 1.5e-3},
}
"""What may follow scheme and level in the name of a variant."""


def levels(
    record: Record,
    *,
    variants: tuple[str, ...] = (
        "bf16-off",
        "w4a16-off",
        "w4a16-linears",
        "w4a16-model",
        "w4a16-exact",
    ),
    seeds: tuple[int, ...] = (0,),
    steps: int = 50,
    config: str = "quickstart.yaml",
) -> None:
    """Make a run of each variant, SCHEME-LEVEL or SCHEME-LEVEL-ENDING, and keep its summary."""
    for variant in variants:
        scheme, level, *ending = variant.split("-")
        for seed in seeds:
            if not record.wants(name := f"{variant} | {seed}"):
                continue
            settings = {"quant.scheme": scheme, "quant.align": level, "seed": seed}
            settings |= {"trainer.total_training_steps": steps} | (
                ENDINGS[ending[0]] if ending else {}
            )
            run = Run.train(name.replace(" | ", "-"), Path("runs/proofs/levels"), config, settings)
            if run.code:
                raise SystemExit(f"{name}: {run.error}")
            summary = run.summary
            applied = Level(summary["quant_align"])
            exact = (
                not applied.zero_mismatch or scheme == "bf16" or summary["mismatch_abs_max"] == 0
            )
            record.add(name, summary, ok=applied >= Level(level) and exact)


def tiny_copy(folder: Path, *, source: str = TINY.name, **changes: Any) -> Path:
    """Copy the quickstart's model, or another one of models/, with other values of its config."""
    shutil.copytree(TINY.with_name(source), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


SAMPLINGS: dict[str, Row] = {
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


def top_p(
    record: Record,
    *,
    models: tuple[str, ...] = ("trained", "random"),
    schemes: tuple[str, ...] = ("bf16", "w4a16"),
    levels: tuple[str, ...] = ("model",),
) -> None:
    """Sample 96 responses in each way, and train two epochs of two mini-batches at learning rate 0.

    `outside`: sampled tokens that the trainer's set lacked. `plain_mean`: mean |δ| of log-probs over all tokens.
    `ratio_abs_dev_max`: largest |r - 1|. The random model's nucleus is a hundred of 288 tokens, the trained one's two.
    """
    with tempfile.TemporaryDirectory() as parent:
        paths = {
            "trained": TINY,
            "random": random_twin(Path(parent) / "random", initializer_range=0.1),
        }
        for model, scheme, level in ((m, s, v) for m in models for s in schemes for v in levels):
            names = {f"{model} | {scheme} | {level} | {kind}": kind for kind in SAMPLINGS}
            if not any(map(record.wants, names)):
                continue
            with local_trainer(
                model__path=paths[model],
                quant__scheme=scheme,
                quant__align=level,
                optim__lr=0,
                actor__ppo_epochs=2,
            ) as trainer:
                for name, kind in names.items():
                    if record.wants(name):
                        row = _sampled(trainer, SAMPLINGS[kind])
                        still = not row["ratio_abs_dev_max"] and not row["token_change_max"]
                        record.add(name, row, ok=row["finite"] and still and not row["max"])


def random_twin(folder: Path, *, source: str = TINY.name, **changes: Any) -> Path:
    """The quickstart's model, or another one of models/, with random weights, and `changes` of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny_copy(folder, source=source)
    layers = changes.get("num_hidden_layers")
    config = AutoConfig.from_pretrained(folder, **changes)
    if layers is not None and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _sampled(trainer: Any, sampling: Row) -> Row:
    config = trainer.config
    trainer.config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update=sampling)}
    )
    temperature = trainer.config.rollout.temperature
    try:
        batch, _ = trainer.rollout()
        old = trainer.old_log_probs(batch)
        update = trainer.update(batch, old)
        again = log_probs(trainer.policy, batch, rows=40, temperature=temperature)
        plain = log_probs(
            trainer.policy, replace(batch, sampling_mask=None), rows=40, temperature=temperature
        )
    finally:
        trainer.config = config
    mask = batch.response_mask
    allowed = batch.sampling_mask
    metrics = mismatch_metrics(old, batch.rollout_log_probs, mask)
    length = float(mask.sum(1).float().mean())
    return {
        "tokens": int(mask.sum()),
        "mean": metrics["mismatch/abs_mean"],
        "max": metrics["mismatch/abs_max"],
        "limit": resolve_limit(
            None, trainer.policy.align, response_length=length, temperature=temperature
        ),
        "kept_mean": None
        if allowed is None
        else float(sum((allowed[mask] >> i & 1).sum() for i in range(8)) / mask.sum()),
        "outside": 0 if batch.outside is None else int(batch.outside.sum()),
        "finite": bool(old.isfinite().all() and again.isfinite().all()),
        "plain_mean": mismatch_metrics(plain, batch.rollout_log_probs, mask)["mismatch/abs_mean"],
        "ratio_abs_dev_max": update["actor/seq_ratio_abs_dev_max"],
        "token_change_max": float((again - old).abs().max()),
    }
