"""δ, seconds and memory of a training step by length of the responses, in both backends.

A model with random weights and heads of 64; all responses of a row have its length. Locally a process takes a step of
each length, the shortest first, so that the process's peak is that of the row. In verl every row is a run. Engine and
trainer have one thread unless `threads` says otherwise.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import (
    LEVELS,
    QUIET,
    ROOT,
    Record,
    Row,
    Run,
    in_process,
    run_config,
    timed,
)
from qarl.config import Config
from qarl.config.level import Level

LENGTHS = (50, 200, 1000, 4000)
KINDS = ("dense", "experts")
SCHEMES = ("w4a16", "w8a8", "fp8", "bf16")
SHAPE: Row = {
    "head_dim": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 8192,
}
IGNORED = {"dense": ["lm_head"], "experts": ["lm_head", "re:.*\\.mlp\\.gate$"]}
PHASES = ("rollout", "old_log_prob", "update", "publish")
VERL_PHASES = ("gen", "old_log_prob", "update_actor")


def long_responses(
    record: Record,
    *,
    backends: tuple[str, ...] = ("local", "verl"),
    kinds: tuple[str, ...] = KINDS,
    schemes: tuple[str, ...] = SCHEMES,
    tokens: tuple[int, ...] = LENGTHS,
    levels: tuple[str, ...] = LEVELS,
    prompt: int = 16,
    hidden: int = 256,
    threads: int = 1,
    split_keys: int = 0,
) -> None:
    """Take a step with responses of each length at each level. `model` and `exact` must have δ = 0 on every token.

    Four responses to two prompts of `prompt` tokens. backend=verl has the default level alone, and prompts of the
    quickstart. `hidden`: the model's width, a multiple of 64, in heads of 64; from 128 on two share their keys.
    `split_keys`: VLLM_CPU_ATTN_SPLIT_KV. With several threads, or if keys are split, δ is only measured.
    """
    promised = threads == 1 and not split_keys
    endings = {
        f"prompt {prompt}": prompt != 16,
        f"hidden {hidden}": hidden != 256,
        f"{threads} threads": threads != 1,
        "split keys": bool(split_keys),
    }
    ending = "".join(f" | {name}" for name, differs in endings.items() if differs)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 128)}
    shape = SHAPE | heads | {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    with tempfile.TemporaryDirectory() as parent:
        models = {
            kind: random_twin(Path(parent) / kind, source=folder, **shape)
            for kind, folder in (("dense", "tiny-qwen3"), ("experts", "tiny-qwen3-moe"))
            if kind in kinds
        }
        for backend, kind, scheme, level in (
            (b, k, s, v) for b in backends for k in kinds for s in schemes for v in levels
        ):
            names = {
                length: f"{backend} | {kind} | {scheme} | {length} | {level}{ending}"
                for length in sorted(tokens)
            }
            lengths = [length for length, name in names.items() if record.wants(name)]
            skipped = (level == "linears" and scheme == "bf16") or (
                backend == "verl" and level != "model"
            )
            if skipped or not lengths:
                continue
            if backend == "verl":
                rows = (
                    verl_row(keys(kind, models[kind], scheme, n, level, prompt), n) for n in lengths
                )
            else:
                environment = {
                    "OMP_NUM_THREADS": str(threads),
                    "VLLM_CPU_ATTN_SPLIT_KV": str(split_keys),
                }
                settings = keys(kind, models[kind], scheme, lengths[-1], level, prompt)
                (rows,) = in_process(local_rows, settings, prompt, lengths, **environment)
            exact = Level(level).follows_engine and promised
            for length, row in zip(lengths, rows, strict=True):
                record.add(
                    names[length],
                    row,
                    ok=row["tokens"] == 4 * length and not (exact and row["max"]),
                )


def keys(kind: str, model: Path, scheme: str, length: int, level: str, prompt: int) -> Row:
    """Return the keys of a run that both backends take."""
    return QUIET | {
        "model.path": str(model),
        "data.train_batch_size": 2,
        "data.max_prompt_length": max(prompt, 32),
        "data.max_response_length": length,
        "reward.function": f"{ROOT / 'benchmarks' / 'proofs' / 'lengths_reward.py'}:reward",
        "rollout.n": 2,
        "rollout.cpu_kvcache_space_gib": 0.25,
        "quant.scheme": scheme,
        "quant.align": level,
        "quant.ignore": IGNORED[kind],
        "quant.mismatch_limit": 100.0,  # `off` and `linears` are measured, whatever their δ is
        "actor.old_log_probs": "recompute",
        "actor.ppo_mini_batch_size": 2,
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "actor.log_prob_micro_batch_size_per_gpu": 4,
    }


def endless_trainer(config: Config, parts: Any) -> Any:
    """Return a trainer whose responses have the longest length that the config allows."""
    from qarl.trainer.local import LocalTrainer

    class Trainer(LocalTrainer):
        def generate(self, prompts: Any, sampling: Any, seeds: Any = None) -> Any:
            return super().generate(prompts, dataclasses.replace(sampling, ignore_eos=True), seeds)

    return Trainer(config, parts)


def local_rows(settings: Row, prompt: int, lengths: list[int]) -> list[Row]:
    """Take a short step to warm up, and a measured one of each length."""
    import torch

    from qarl.data.prompts import Prompt, PromptDataset
    from qarl.trainer.prepare import prepare_run

    with tempfile.TemporaryDirectory() as folder:
        config = run_config("quickstart.yaml", settings | {"output_dir": folder})
        trainer = endless_trainer(config, prepare_run(config))
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(
            3, 250, (len(trainer.parts.train_prompts), prompt), generator=draw
        ).tolist()
        trainer.parts.train_prompts = PromptDataset(
            [Prompt(i, "random", [], row, "") for i, row in enumerate(rows)]
        )
        with trainer.engine:
            trainer.publish()
            local_row(trainer, 16)
            return [local_row(trainer, length) for length in lengths]


def local_row(trainer: Any, length: int) -> Row:
    """Take a step whose responses have `length` tokens."""
    import resource

    data = trainer.config.data.model_copy(update={"max_response_length": length})
    trainer.config = trainer.config.model_copy(update={"data": data})
    trainer.timer.pop()
    start = time.monotonic()
    metrics = trainer.train_step()
    seconds = {"step": round(time.monotonic() - start, 2)}
    phases = trainer.timer.pop()
    seconds |= {name: round(phases[f"timing_s/{name}"], 2) for name in PHASES}
    return measured(metrics, 4 * metrics["response_length/mean"]) | {
        "level_applied": trainer.policy.align,
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def measured(metrics: Row, tokens: float) -> Row:
    return {
        "mean": metrics["mismatch/abs_mean"],
        "max": metrics["mismatch/abs_max"],
        "tokens": round(tokens),
    }


def verl_row(settings: Row, length: int) -> Row:
    """Train two steps on one rank, as a user would. The second one is measured, and δ is the larger of both."""
    settings = settings | {"trainer.resume_mode": "disable", "trainer.total_training_steps": 2}
    spent: Row = {}
    with timed(spent), tempfile.TemporaryDirectory() as folder:
        given = {"actor_rollout_ref.rollout.ignore_eos": True}
        run = Run.train("run", Path(folder), "quickstart_verl.yaml", settings, verl=given)
        steps = run.steps
        if run.code or len(steps) != 2:
            return {"tokens": 0, "error": run.error or run.text[-1500:]} | spent
    worst = max(steps, key=lambda step: step["mismatch/abs_max"])
    last = steps[-1]
    seconds = {
        name: round(last[f"timing_s/{name}"], 2)
        for name in VERL_PHASES
        if f"timing_s/{name}" in last
    }
    return measured(worst, 4 * last["response_length/mean"]) | {"seconds": seconds} | spent
