"""One decoder layer of Qwen3-30B-A3B at its real size, through a training step of the local backend and real vLLM.

The layer has 128 experts, 8 per token, with random weights; the vocabulary is shortened, or the embeddings would be as
large as the layer. The run is `configs/qwen3_30b_w4a16.yaml` but for the keys below: one process, AdamW, short
responses, and a learning rate at which one step moves every weight visibly.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.proofs.harness import QUIET, ROOT, Record, Row, batch_of, log_probs, run_config
from qarl.align.router import known_routing
from qarl.bench.model import find_model
from qarl.config.level import Level
from qarl.diagnose.diagnosis import with_keys
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.local import LocalTrainer, request_seed
from qarl.trainer.policy import Policy
from qarl.trainer.prepare import prepare_run

PROMPTS = 8
RESPONSE = 32
RANDOM_MODEL = ROOT / "scripts" / "random_model.py"
SEED_STEP = -2
"""Stands for the training step in the seeds of the compared samples."""


def experts_real_size(record: Record, *, vocabulary: int = 4096, steps: int = 1) -> None:
    """Publish, sample, compare log-probs, train, and sample again with the same seeds."""
    if not record.wants("one layer"):
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        shape = dict(find_model("Qwen3-30B-A3B").config) | {
            "num_hidden_layers": 1,
            "max_window_layers": 1,
        }
        (folder / "shape").mkdir()
        (folder / "shape" / "config.json").write_text(
            json.dumps(shape | {"vocab_size": vocabulary})
        )
        arguments = ["--model", str(folder / "shape"), "--output", str(folder / "layer")]
        subprocess.run([sys.executable, str(RANDOM_MODEL), *arguments], check=True)
        row = measure(run_config("qwen3_30b_w4a16.yaml", keys(folder, steps)))
    moved = row["after_training"]["other_tokens_frac"] > 0
    record.add("one layer", row, ok=moved and row["mismatch"]["model"]["abs_max"] < 0.1)


def keys(folder: Path, steps: int) -> Row:
    return QUIET | {
        "name": "real_size",
        "backend": "local",
        "output_dir": folder / "runs",
        "model.path": folder / "layer" / "model",
        "data.train_files": str(folder / "layer" / "prompts.jsonl"),
        "data.val_files": [],
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 24,
        "data.max_response_length": RESPONSE,
        "reward.function": f"{RANDOM_MODEL}:reward",
        "rollout.n": 2,
        "rollout.val_temperature": 0,
        "rollout.tensor_model_parallel_size": 1,
        "rollout.cpu_kvcache_space_gib": 0.125,
        "rollout.enforce_eager": True,
        "quant.align": "model",
        "actor.ppo_mini_batch_size": PROMPTS,
        "actor.ppo_micro_batch_size_per_gpu": 2 * PROMPTS,
        "actor.log_prob_micro_batch_size_per_gpu": 2 * PROMPTS,
        "optim.name": "adamw",
        "optim.lr": 1e-3,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": -1,
    }  # fmt: skip


def measure(config: Any) -> Row:
    """Return what was published, δ by level before training, each step's metrics, and δ after them."""
    trainer = LocalTrainer(config, prepare_run(config))
    levels = {}
    with trainer.engine:
        report = trainer.publish()
        first = sample(trainer)
        levels[config.quant.align] = mismatch(trainer.policy, first)
        for replay in ("on", "off"):
            rollout = config.rollout.model_copy(update={"router_replay": replay})
            changed = with_keys(config, {"quant.align": Level.LINEARS}).model_copy(
                update={"rollout": rollout}
            )
            levels[f"linears, replay {replay}"] = mismatch(Policy.load(changed), first)
        trainer.timer.pop()
        steps = [
            trainer.train_step() | trainer.timer.pop()
            for _ in range(config.trainer.total_training_steps)
        ]
        last = sample(trainer)
        after = mismatch(trainer.policy, last)
    tokens = [torch.tensor(batch.response_token_ids) for batch in (first, last)]
    assert first.routed_experts is not None
    return {
        "published": dataclasses.asdict(report) | {"quantized_ratio": report.quantized_ratio},
        "sampled_tokens": tokens[0].numel(),
        "experts_used": len(torch.cat(first.routed_experts).unique()),
        "mismatch": levels,
        "steps": steps,
        "after_training": {"weight_version": last.weight_version, "mismatch": after}
        | {"other_tokens_frac": float((tokens[0] != tokens[1]).float().mean())},
    }


def sample(trainer: LocalTrainer) -> RolloutBatch:
    """Return two responses to each prompt, whose seeds do not depend on the training step."""
    prompts = [
        prompt.prompt_token_ids
        for prompt in islice(trainer.parts.train_prompts, PROMPTS)
        for _ in range(2)
    ]
    seeds = [request_seed(trainer.config.seed, SEED_STEP, i) for i in range(len(prompts))]
    return trainer.generate(
        prompts, dataclasses.replace(SamplingConfig.of_run(trainer.config), ignore_eos=True), seeds
    )


def mismatch(policy: Policy, rollout: RolloutBatch) -> dict[str, float]:
    """Return mean and largest |δ|, and the share of tokens that the policy's own router sends elsewhere."""
    batch: Any = batch_of(rollout)
    values = log_probs(policy, batch, rows=len(batch))
    metrics = mismatch_metrics(values, batch.rollout_log_probs, batch.response_mask)
    known = known_routing(batch.routed_experts).any(-1)
    statistics = {name: metrics[f"mismatch/{name}"] for name in ("abs_mean", "abs_max", "k3")}
    return statistics | {"other_experts_frac": float(batch.other_experts[known].float().mean())}
