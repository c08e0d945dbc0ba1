"""What turns cost: seconds and prefilled tokens of up to 120 sampled tokens in 1, 3 and 10 turns.

A random model samples turns, all of them together of at most 120 tokens, and an environment answers each with 12
characters, so that little but the cuts differs. Turns that end early make some conversations shorter, so seconds are
also given for 1,000 sampled tokens. Below the border of `docs/understand/alignment.md#conversations` a later turn is a
request, with and without a prefix cache; above it the engine keeps keys and values in a session, or, inexactly, gets
requests.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.proofs.align import random_twin
from benchmarks.proofs.harness import Record, Row, Run
from benchmarks.proofs.turns import FOLDER, RANDOM, SHAPE, SHORT, SMALL

SAMPLED = 120
"""Tokens that the model samples in a conversation at most."""
TURNS = (1, 3, 10)
WARM_UP = 2
"""Steps that are not counted: the first ones compile and grow buffers."""
BELOW: Row = {"data.max_response_length": 480}
ABOVE: Row = {"data.max_response_length": 1600}
WAYS: Mapping[str, Row] = {
    "requests, prefix cache": BELOW | {"rollout.enable_prefix_caching": True},
    "requests": BELOW | {"rollout.enable_prefix_caching": False},
    "sessions": ABOVE,
    "requests above the border": ABOVE | {"rollout.enable_prefix_caching": True},
}
SAME_BITS = tuple(name for name in WAYS if name != "requests above the border")
PHASES = ("rollout", "old_log_prob", "update", "environment", "step")
COUNTS = (
    "turns/mean",
    "turns/prefilled_tokens",
    "turns/context_tokens",
    "response_length/mean",
)


def turn_costs(record: Record, *, schemes: tuple[str, ...] = ("w4a16",), steps: int = 8) -> None:
    """The median step of each way and number of turns."""
    for scheme in schemes:
        for way, keys in WAYS.items():
            for turns in TURNS:
                if record.wants(name := f"{scheme} | {way} | {turns}"):
                    row = measured(scheme, keys, turns, steps)
                    exact = row["largest_abs_delta"] == 0 or way not in SAME_BITS
                    record.add(name, row, ok=exact and row["turns/mean"] == turns)


def measured(scheme: str, keys: Row, turns: int, steps: int) -> Row:
    """Train a random model for `steps` steps, and return the medians of those after `WARM_UP`."""
    with tempfile.TemporaryDirectory() as folder:
        twin = random_twin(Path(folder) / "model", source="tiny-qwen3", **SHAPE)
        settings = SMALL | SHORT | RANDOM | keys | {
            "model.path": str(twin),
            "quant.scheme": scheme,
            "multi_turn.max_assistant_turns": turns,
            "multi_turn.max_turn_length": SAMPLED // turns,
            "trainer.num_threads": 1,
            "trainer.total_training_steps": steps,
        }  # fmt: skip
        run = Run.train(f"cost-{turns}", FOLDER, "quickstart.yaml", settings)
        if run.code:
            raise RuntimeError("\n".join(run.error))
        return medians(run.steps[WARM_UP:])


def medians(steps: Sequence[Row]) -> Row:
    """Return the medians of counts and seconds, and the largest |δ|."""
    row: Row = {"largest_abs_delta": max(float(step["mismatch/abs_max"]) for step in steps)}
    for name in COUNTS:
        row[name] = round(statistics.median(float(step.get(name, 0)) for step in steps), 2)
    for phase in PHASES:
        seconds = statistics.median(float(step.get(f"timing_s/{phase}", 0)) for step in steps)
        row[f"{phase}_s"] = round(seconds, 4)
    sampled = row["response_length/mean"] * SMALL["data.train_batch_size"] * SMALL["rollout.n"]
    for phase in ("rollout", "step"):
        row[f"{phase}_per_1000_tokens_s"] = round(1000 * row[f"{phase}_s"] / sampled, 4)
    return row
