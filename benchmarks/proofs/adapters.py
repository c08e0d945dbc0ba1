"""The mismatch of runs with adapters: every scheme at every level, dense and experts, in each backend."""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks.proofs import trl
from benchmarks.proofs.harness import LEVELS, QUIET, ROOT, SCHEMES, Record, Row, Run, timed

FOLDER = ROOT / "runs" / "proofs" / "adapters"
SMALL: Row = {
    "lora.r": 8,
    "optim.lr": 1.5e-3,
    "data.train_batch_size": 8,
    "rollout.n": 4,
    "rollout.cpu_kvcache_space_gib": 0.25,
    "actor.ppo_mini_batch_size": 4,
    "actor.ppo_micro_batch_size_per_gpu": 8,
    "actor.log_prob_micro_batch_size_per_gpu": 16,
}
"""32 responses a step and two updates, for one or two ranks."""
CONFIGS = {"local": "quickstart.yaml", "verl": "quickstart_verl.yaml"}
ROUTERS = ["lm_head", "re:.*\\.mlp\\.gate$"]
MODELS: dict[str, Row] = {
    "dense": {},
    "experts": {"model.path": "models/tiny-qwen3-moe", "quant.ignore": ROUTERS},
}
BACKENDS = ("local", "trl", "verl", "verl on two ranks")


def adapters_levels(
    record: Record,
    *,
    backends: tuple[str, ...] = BACKENDS,
    models: tuple[str, ...] = tuple(MODELS),
    schemes: tuple[str, ...] = SCHEMES,
    levels: tuple[str, ...] = LEVELS,
    steps: int = 50,
) -> None:
    """Train adapters for `steps` steps: |δ| over all steps, which `model` and `exact` must make 0 on a CPU.

    Level `off` is for a base in BF16 alone; with another one QaRL refuses it.
    """
    for backend, model, level, scheme in product(backends, models, levels, schemes):
        name = f"{backend} | {model} | {scheme} | {level}"
        if record.wants(name) and (level != "off" or scheme == "bf16"):
            row: Row = {}
            with timed(row):
                logged, applied = (under_trl if backend == "trl" else trained)(backend, model, scheme, level, steps)
            row |= summarised(logged) | {"applied": applied}
            reached = LEVELS.index(applied) >= LEVELS.index(level)
            exact = LEVELS.index(level) < LEVELS.index("model") or row["abs_max"] == 0
            record.add(name, row, ok=reached and exact and row["grad_norm_min"] > 0)


def trained(backend: str, model: str, scheme: str, level: str, steps: int) -> tuple[list[Row], str]:
    settings = QUIET | SMALL | MODELS[model] | {"quant.scheme": scheme, "quant.align": level}
    settings |= {"trainer.total_training_steps": steps, "trainer.resume_mode": "disable", "trainer.val_max_prompts": 8}
    settings |= {"trainer.n_gpus_per_node": 2} if backend == "verl on two ranks" else {}
    name = f"{backend}-{model}-{scheme}-{level}".replace(" ", "_")
    run = Run.train(name, FOLDER, CONFIGS[backend.split()[0]], settings)
    if run.code or len(run.steps) != steps:
        raise SystemExit(f"{name}: {len(run.steps)} steps, {run.error}")
    return run.steps, run.summary["quant_align"]


def under_trl(backend: str, model: str, scheme: str, level: str, steps: int) -> tuple[list[Row], str]:
    """The same under TRL, which counts updates as steps, two for each rollout."""
    settings: dict[str, Any] = {
        "quant_scheme": scheme,
        "quant_align": level,
        "lora": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
        "learning_rate": 1.5e-3,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "logging_steps": 1,
        "max_steps": 2 * steps,
    }
    if model == "experts":
        settings |= {"model": str(ROOT / MODELS[model]["model.path"]), "quant_ignore": ROUTERS}
    (outcome,) = trl.run(settings)
    return [{"actor/grad_norm": entry["grad_norm"]} | entry for entry in outcome["history"]], outcome["level"]


def summarised(steps: list[Row]) -> Row:
    """Return what was logged of the mismatch, over all steps that have it, and the smallest gradient."""
    measured = [step for step in steps if "mismatch/abs_max" in step]
    return {
        "steps": len(measured),
        "abs_mean": sum(float(step["mismatch/abs_mean"]) for step in measured) / len(measured),
        "abs_max": max(float(step["mismatch/abs_max"]) for step in measured),
        "k3": sum(float(step["mismatch/k3"]) for step in measured) / len(measured),
        "grad_norm_min": min(float(step["actor/grad_norm"]) for step in steps),
    }
