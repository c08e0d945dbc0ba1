"""The mismatch of runs with adapters: every scheme at every level, dense and experts, in each backend; each family."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.proofs import trl
from benchmarks.proofs.families import (
    ALL,
    run_arguments,
    write_config,
    write_prompts,
    write_weights,
)
from benchmarks.proofs.harness import (
    LEVELS,
    QUIET,
    ROOT,
    SCHEMES,
    Record,
    Row,
    Run,
    arguments,
    timed,
)
from qarl.config import load_config
from qarl.config.level import Level
from qarl.families import family_named

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
        if record.wants(name) and (Level(level).low_bit or scheme == "bf16"):
            row: Row = {}
            with timed(row):
                logged, applied = (under_trl if backend == "trl" else trained)(
                    backend, model, scheme, level, steps
                )
            row |= summarised(logged) | {"applied": applied}
            reached = Level(applied) >= Level(level)
            exact = not Level(level).follows_engine or row["abs_max"] == 0
            record.add(
                name, row, ok=reached and exact and row["steps_with_gradient"] > row["steps"] / 2
            )


def trained(backend: str, model: str, scheme: str, level: str, steps: int) -> tuple[list[Row], str]:
    settings = QUIET | SMALL | MODELS[model] | {"quant.scheme": scheme, "quant.align": level}
    settings |= {
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        "trainer.val_max_prompts": 8,
    }
    settings |= {"trainer.n_gpus_per_node": 2} if backend == "verl on two ranks" else {}
    name = f"{backend}-{model}-{scheme}-{level}".replace(" ", "_")
    run = Run.train(name, FOLDER, CONFIGS[backend.split()[0]], settings)
    if run.code or len(run.steps) != steps:
        raise SystemExit(f"{name}: {len(run.steps)} steps, {run.error}")
    return run.steps, run.summary["quant_align"]


def under_trl(
    backend: str, model: str, scheme: str, level: str, steps: int
) -> tuple[list[Row], str]:
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
        settings |= {"router_aux_loss_coef": 0}  # which QaRL under TRL requires of experts
    (outcome,) = trl.run(settings)
    return [
        {"actor/grad_norm": entry["grad_norm"]} | entry for entry in outcome["history"]
    ], outcome["level"]


def summarised(steps: list[Row]) -> Row:
    """Return what was logged of the mismatch, over all steps that have it. In a step in which the responses to each
    prompt have equal rewards, the gradient is 0."""
    measured = [step for step in steps if "mismatch/abs_max" in step]
    return {
        "steps": len(measured),
        "abs_mean": sum(float(step["mismatch/abs_mean"]) for step in measured) / len(measured),
        "abs_max": max(float(step["mismatch/abs_max"]) for step in measured),
        "k3": sum(float(step["mismatch/k3"]) for step in measured) / len(measured),
        "steps_with_gradient": sum(float(step["actor/grad_norm"]) > 0 for step in measured),
    }


REWARD = """\
def letters(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)))
"""


def adapters_families(
    record: Record,
    *,
    families: tuple[str, ...] = ALL,
    schemes: tuple[str, ...] = ("w4a16", "bf16"),
    steps: int = 3,
) -> None:
    """Train adapters of a random model of each family, so fast that they matter: |δ| of the last step.

    It must be 0 where level `exact` exists. Elsewhere it is 0.6 to 2.6 times the family's `linears_mismatch`, which is
    of the first step and of W4A16: it depends on the weights, which have changed. Three times is allowed."""
    for family, scheme in product(families, schemes):
        if family_named(family).adapters and record.wants(name := f"{family} | {scheme}"):
            last = trained_family(family, scheme, steps)
            row: Row = {key: last[f"mismatch/{key}"] for key in ("abs_mean", "abs_max", "k3")}
            row["grad_norm"] = last["actor/grad_norm"]
            limit = 3 * (family_named(family).linears_mismatch or 0.0)
            record.add(name, row, ok=row["abs_mean"] <= limit and row["grad_norm"] > 0)


def trained_family(family: str, scheme: str, steps: int) -> Row:
    """Return the metrics of the last step of a run of a small random model, in this process."""
    from qarl.trainer.local import LocalTrainer
    from qarl.trainer.prepare import prepare_run

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        reward = Path(parent) / "reward.py"
        write_prompts(Path(parent))
        write_config(folder, family, {})
        write_weights(folder)
        reward.write_text(REWARD)
        keys = {"lora.r": 8, "optim.lr": 3e-2, "optim.lr_scheduler_type": "constant"}
        more = arguments(keys | {"reward.function": f"{reward}:letters"})
        config = load_config([*run_arguments(folder, scheme), *more])
        trainer = LocalTrainer(config, prepare_run(config))
        with trainer.engine:
            trainer.publish()
            return [trainer.train_step() for _ in range(steps)][-1]
