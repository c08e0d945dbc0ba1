"""Conversations of several turns with a tool: δ over whole runs in each backend.

The demo's calculator trains, whose model calls its tool three times, and random models where a conversation is to be
long or the model has experts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.proofs import trl
from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import QUIET, ROOT, Record, Row, Run, timed

FOLDER = ROOT / "runs" / "proofs" / "turns"
STEPS = 50
SCHEMES = ("w4a16", "w8a8", "bf16")
CALCULATOR = ROOT / "models" / "tiny-qwen3-calculator"
ENVIRONMENTS = ROOT / "benchmarks" / "proofs" / "turn_environments.py"
SMALL: Row = QUIET | {
    "data.train_batch_size": 4,
    "rollout.n": 4,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_gpu": 8,
    "actor.log_prob_micro_batch_size_per_gpu": 8,
    "actor.old_log_probs": "recompute",
}
RANDOM: Row = {"reward.function": "environment", "multi_turn.max_assistant_turns": 3}
LONG: Row = RANDOM | {
    "rollout.environment": f"{ENVIRONMENTS}:long",
    "data.max_response_length": 1600,
    "multi_turn.max_turn_length": 60,
    "multi_turn.max_tool_response_length": 700,
}
SHORT: Row = RANDOM | {
    "rollout.environment": f"{ENVIRONMENTS}:short",
    "data.max_response_length": 200,
    "multi_turn.max_turn_length": 40,
}
SHAPE: Row = {
    "head_dim": 64,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 4096,
}
MEANS = ("turns/mean", "turns/context_tokens", "turns/prefilled_tokens", "response_length/mean")


@dataclass(frozen=True)
class Kind:
    """A model with its environment. `twin`: the model of models/ whose random twin trains; None for the calculator.

    `unproved`: backends in which δ above the border is not 0, so that it is only measured.
    """

    settings: Row = field(default_factory=dict)
    config: str = "quickstart.yaml"
    twin: str | None = None
    unproved: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "calculator": Kind(config="calculator.yaml"),
    "adapters": Kind({"lora.r": 8, "optim.lr": 1.5e-3}, config="calculator.yaml"),
    "experts": Kind(SHORT, "quickstart_moe.yaml", "tiny-qwen3-moe"),
    "1500 tokens": Kind(LONG, twin="tiny-qwen3", unproved=("verl",)),
}
TRL_KINDS: Mapping[str, Row] = {
    "calculator": {
        "model": str(CALCULATOR),
        "data": str(ROOT / "data/calculator/train.parquet"),
        "environment": "qarl.demo.calculator:answer",
        "max_completion_length": 112,
    },
    "1500 tokens": {
        "environment": LONG["rollout.environment"],
        "max_completion_length": LONG["data.max_response_length"],
        "max_tool_calling_iterations": 2,  # answers, so three turns
        "max_turn_length": LONG["multi_turn.max_turn_length"],
        "max_tool_response_length": LONG["multi_turn.max_tool_response_length"],
    },
}
"""The same kinds in TRL's words."""
ARMS: tuple[tuple[str, str, str], ...] = (
    *(("local", "calculator", scheme) for scheme in SCHEMES),
    *(("local", "1500 tokens", scheme) for scheme in SCHEMES),
    ("local", "experts", "w4a16"),
    *(("verl", "calculator", scheme) for scheme in SCHEMES),
    ("verl", "adapters", "w4a16"),
    ("verl", "1500 tokens", "w4a16"),
    *(("trl", "calculator", scheme) for scheme in SCHEMES),
    ("trl", "1500 tokens", "w4a16"),
)
"""Backend, kind and scheme of each row: every scheme with the calculator in every backend, the rest once."""


def turns(
    record: Record,
    *,
    backends: tuple[str, ...] = ("local", "verl", "trl"),
    schemes: tuple[str, ...] = SCHEMES,
    steps: int = STEPS,
) -> None:
    """The largest |δ| of any token that the model sampled, in every turn of every step, at the default level."""
    for backend, kind, scheme in ARMS:
        if backend not in backends or scheme not in schemes:
            continue
        if not record.wants(name := f"{backend} | {kind} | {scheme}"):
            continue
        spent: Row = {}
        with timed(spent):
            run = under_trl if backend == "trl" else trained
            code, logged = run(backend, kind, scheme, steps)
        row: Row = {"exit_code": code, "steps": len(logged), **figures(logged)}
        exact = backend in KINDS[kind].unproved or row.get("largest_abs_delta") == 0
        whole = code == 0 and len(logged) == steps and row["turns/mean"] > 2.5
        record.add(name, row | spent, ok=whole and exact)


def trained(backend: str, kind: str, scheme: str, steps: int) -> tuple[int, list[Row]]:
    """Run `qarl train`, and return its exit code and logged steps."""
    chosen = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        settings = SMALL | chosen.settings | {
            "backend": backend,
            "quant.scheme": scheme,
            "trainer.total_training_steps": steps,
        }  # fmt: skip
        if chosen.twin:
            twin = random_twin(Path(folder) / "model", source=chosen.twin, **SHAPE)
            settings["model.path"] = str(twin)
        name = f"{backend}-{kind}-{scheme}".replace(" ", "_")
        run = Run.train(name, FOLDER, chosen.config, settings)
        return run.code, run.steps


def under_trl(backend: str, kind: str, scheme: str, steps: int) -> tuple[int, list[Row]]:
    """Train the kind's model under TRL: each rollout serves one optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TRL_KINDS[kind] | {
            "reward": "environment",
            "quant_scheme": scheme,
            "max_steps": steps,
            "logging_steps": 1,
            "per_device_train_batch_size": 16,
            "steps_per_generation": 1,
            "num_generations": 4,
        }
        if twin := KINDS[kind].twin:
            settings["model"] = str(random_twin(Path(folder) / "model", source=twin, **SHAPE))
        (outcome,) = trl.run(settings)
    return 0, outcome["history"]


def figures(logged: Sequence[Row]) -> Row:
    """Return what a row says of its steps."""
    if not logged:
        return {}
    row: Row = {
        "largest_abs_delta": max(float(step["mismatch/abs_max"]) for step in logged),
        "mean_abs_delta": statistics.fmean(float(step["mismatch/abs_mean"]) for step in logged),
    }
    for name in MEANS:
        values = [float(step[name]) for step in logged if name in step]
        if values:
            row[name] = round(statistics.fmean(values), 2)
    name = "critic/score/mean" if "critic/score/mean" in logged[0] else "reward"
    return row | {"rewards": [round(float(step[name]), 3) for step in (logged[0], logged[-1])]}
