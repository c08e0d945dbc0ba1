"""Conversations of three turns in verl, on two ranks: δ over 50 steps, by scheme and agent loop."""

from __future__ import annotations

from benchmarks.proofs.harness import Record, Row, timed
from benchmarks.proofs.verl_runs import FOLDER, SMALL, Case, start

STEPS = 50
SETTINGS: Row = SMALL | {
    "trainer.n_gpus_per_node": 2,
    "rollout.n": 4,
    "data.max_response_length": 200,
    "rollout.environment": "benchmarks/proofs/three_turns.py:answer",
    "multi_turn.max_turn_length": 60,
    "reward.function": "environment",
    "actor.old_log_probs": "recompute",
}
SUMS = ("turns/mean", "turns/context_tokens", "response_length/mean")


def verl_turns(
    record: Record, *, schemes: tuple[str, ...] = ("w4a16", "w8a8", "bf16"), steps: int = STEPS
) -> None:
    """The largest |δ| of any token of the model, in every step and turn."""
    for scheme in schemes:
        if not record.wants(scheme):
            continue
        case = Case(scheme, "model", SETTINGS | {"quant.scheme": scheme}, steps=steps)
        spent: Row = {}
        with timed(spent):
            code, error, logged = start(scheme, case, FOLDER / "verl_turns")
        row: Row = {"exit_code": code, "steps": len(logged), "error": error}
        if logged:
            row["largest_abs_delta"] = max(step["mismatch/abs_max"] for step in logged)
            row["rewards"] = [
                round(step["critic/score/mean"], 3) for step in (logged[0], logged[-1])
            ]
            row |= {key: sum(step[key] for step in logged) / len(logged) for key in SUMS}
        exact = row.get("largest_abs_delta") == 0 and row.get("turns/mean", 0) > 2.5
        record.add(scheme, row | spent, ok=code == 0 and len(logged) == steps and exact)
