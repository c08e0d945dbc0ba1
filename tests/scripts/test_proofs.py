"""benchmarks/proofs: rows that are written and continued, figures that are compared, and verdicts that can fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from benchmarks.proofs import runs, verl_kills
from benchmarks.proofs.__main__ import parameters
from benchmarks.proofs.harness import Record, Run, differences, rows_of
from benchmarks.proofs.registry import proofs
from benchmarks.proofs.verl_runs import CASES, PAIRS, judged


def test_a_result_is_written_row_by_row_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    record = Record(path, "the command")
    assert record.wants("a") and not record.ok
    record.add("a", {"x": 1})
    assert not record.wants("a") and record.ok
    again = Record(path, "the command", only="b|c")
    assert not again.wants("a") and again.wants("b") and not again.wants("d")
    again.add("b", {"x": 2}, ok=False)
    document = json.loads(path.read_text())
    assert list(document["rows"]) == ["a", "b"] and not again.ok
    assert {"date", "commit", "cpu", "versions", "amx_tiles"} <= set(document) and document["command"] == "the command"
    assert Record(path, "", again=True).wants("a")


def test_older_results_are_read() -> None:
    rows = [{"kind": "dense", "scheme": "fp8"}]
    named = {"dense | fp8": rows[0]}
    assert rows_of(rows, ("kind", "scheme")) == rows_of({"date": "", "rows": rows}, ("kind", "scheme")) == named
    assert rows_of({"results": named}) == rows_of({"runs": named}) == named


def test_what_differs() -> None:
    old = {"ok": True, "mean": 1e-3, "seconds": 3.0, "count": 7, "steps": [{"max": 0.0}]}
    assert list(differences(old, old | {"seconds": 9.0, "mean": 1.4e-3, "new": 1})) == []
    found = differences(old, old | {"ok": False, "mean": 3e-3, "count": 8, "steps": [{"max": 1e-9}]})
    assert [line.partition(":")[0] for line in found] == ["count", "mean", "ok", "steps[0].max"]


def test_parameters_are_those_of_the_function() -> None:
    found = parameters(proofs()["publish_stress"], ["publishes=7", "schemes=w4a16,fp8"])
    assert found == {"publishes": 7, "schemes": ("w4a16", "fp8")}
    with pytest.raises(SystemExit, match="no parameter seed; it has schemes, publishes, sets"):
        parameters(proofs()["publish_stress"], ["seed=1"])


HEALTHY = {
    "step": 1,
    "mismatch/abs_mean": 0.0,
    "mismatch/abs_max": 0.0,
    "mismatch/over_limit": 0.0,
    "rollout/preemptions": 5.0,
    "response_length/mean": 50.0,
}
REFUSAL = ["error: trainer and engine disagree: mean |δ| between trainer and engine is 7 nats per token"]
EXACT, FEW, OTHER = "exact_two_ranks", "exact_preempted", "other_norm"


@pytest.mark.parametrize(
    ("name", "code", "error", "steps", "ok"),
    [
        (EXACT, 0, [], [HEALTHY] * 2, True),
        (EXACT, 0, [], [HEALTHY], False),
        (EXACT, 1, [], [HEALTHY] * 2, False),
        (EXACT, 0, [], [HEALTHY, HEALTHY | {"mismatch/abs_max": 1e-7}], False),
        ("linears", 0, [], [HEALTHY, HEALTHY | {"mismatch/abs_max": 1e-7}], True),
        ("linears", 0, [], [HEALTHY, HEALTHY | {"mismatch/abs_mean": 0.16}], False),
        ("linears", 0, [], [HEALTHY, HEALTHY | {"mismatch/over_limit": 1.0}], False),
        (FEW, 0, [], [HEALTHY] * 2, True),
        (FEW, 0, [], [HEALTHY, HEALTHY | {"rollout/preemptions": 0.0}], False),
        (OTHER, 2, REFUSAL, [], True),
        (OTHER, 2, ["error: something else"], [], False),
        (OTHER, 2, REFUSAL, [HEALTHY], False),
        ("model", 2, REFUSAL, [], False),
    ],
)
def test_a_verl_run_is_judged(name: str, code: int, error: list[str], steps: list[dict[str, Any]], ok: bool) -> None:
    assert judged(CASES[name], code, error, steps)[1] == ok


def test_the_pairs_cover_every_pair_of_two_columns() -> None:
    rows = [tuple(case.what.split(", ")) for case in PAIRS.values()]
    for i in range(5):
        for j in range(i):
            every = {(row[i], row[j]) for row in rows}
            assert len(every) == len({row[i] for row in rows}) * len({row[j] for row in rows})


VERIFIED = "rank 0: resumed state equals the saved one by checksum: 193 parts, 0f (of model, optimizer, extra)\n"


@pytest.mark.parametrize(
    ("said", "asked", "steps", "ended", "ok"),
    [
        (VERIFIED, "5", range(1, 6), True, True),
        (VERIFIED, "5", range(1, 5), True, True),  # the last prompts may be lost in the kill
        ("", "5", range(1, 6), True, False),
        (VERIFIED, "other", range(1, 6), True, False),
        (VERIFIED, "5", (), True, False),
        (VERIFIED, "5", range(1, 6), False, False),  # a signal without its answer
    ],
)
def test_a_resumed_verl_run_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, asked: str, steps: Sequence[int], ended: bool, ok: bool
) -> None:
    """Killed after step 5, with a checkpoint of step 4. `steps`: those whose prompts were written down."""
    for side, prompts in (("killed", {step: asked if step == 5 else "" for step in steps}), ("resumed", {5: "5"})):
        (tmp_path / f"kill.{side}").mkdir()
        for step, prompt in prompts.items():
            (tmp_path / f"kill.{side}/{step}.jsonl").write_text(json.dumps({"input": prompt}) + "\n")
    started: list[int] = []

    class Ended:
        code, text, folder = 0, said, tmp_path

        def __init__(self, *args: Any) -> None:
            started.append(5 if not started else 8)
            self.step = started[-1]

    monkeypatch.setattr(Run, "start", Ended)
    monkeypatch.setattr(verl_kills, "end_run", lambda *args: {"ended": ended})
    monkeypatch.setattr(verl_kills, "last_checkpoint", lambda folder: 8 if started[-1] == 8 else 4)
    assert verl_kills.resumed("kill", tmp_path, 1, "SIGKILL", 1.0)["as_it_should"] is ok


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.4] * 20, None),
        ([0.4] * 5 + [0.0] * 5, 8),  # means of five: 0.4, 0.32, 0.24, 0.16
        ([0.4] * 5 + [0.2] * 20, None),  # exactly half is not below half
        ([0.1] * 10 + [0.4] * 10 + [0.15] * 10, 25),  # the peak counts, not the start: 0.2 at step 24, 0.15 at 25
    ],
)
def test_when_a_reward_falls(rewards: list[float], step: int | None) -> None:
    history = [{"step": i, "critic/score/mean": value} for i, value in enumerate(rewards, 1)]
    assert runs.fell_at(history) == runs.seen(history)["reward_fell_at_step"] == step


@pytest.mark.parametrize(
    ("kind", "fell", "warned", "good"),
    [("healthy", None, [], True), ("healthy", None, [30], False), ("collapse", 30, [29], True),
     ("collapse", 30, [30], False), ("collapse", None, [30], False)],
)  # fmt: skip
def test_a_warning_must_come_before_the_fall(kind: str, fell: int | None, warned: list[int], good: bool) -> None:
    found = {"reward_fell_at_step": fell, "warnings": [{"step": step} for step in warned]}
    assert runs.as_it_should(kind, found) is good


def test_what_an_objective_must_log() -> None:
    keys = runs.OBJECTIVES["tis-srs-k3-corr-ratio"]
    step = {"actor/pg_loss": 1.0, "actor/grad_norm": 1.0, "mismatch/abs_mean": 0.0, "mismatch/abs_max": 0.0}
    step |= dict.fromkeys(("correction/rejected_response_frac", "correction/rejected_token_frac"), 0.0)
    whole = step | {"correction/weight_mean": 1.0}
    assert runs.judged(keys, "model", [whole] * 2, 1e-4)["wrong"] == []
    for wrong in ([whole], [whole, step], [whole, whole | {"actor/pg_loss": float("nan")}],
                  [whole, whole | {"actor/grad_norm": 0.0}], [whole, whole | {"mismatch/abs_max": 1e-3}]):  # fmt: skip
        assert runs.judged(keys, "model", wrong, 1e-4)["wrong"]


def promised(name: str) -> dict[str, Any]:
    proof = proofs()[name]
    return rows_of(json.loads((ROOT / "benchmarks" / "results" / proof.file).read_text()), proof.key)


def test_the_committed_gathers_have_the_bits_of_one_rank() -> None:
    rows = promised("low_bit_gather")
    assert len(rows) == 6
    for row in rows.values():
        assert len({found["logits"] for found in row.values() if isinstance(found, dict)}) == 1


def test_only_the_order_of_sums_tells_the_number_of_ranks() -> None:
    for case in promised("steps_on_ranks").values():
        for found in (*case["pair"].values(), *case["unclipped"].values()):
            assert found["first_differing_step"] is None
        for found in case["shared"].values():
            assert found["at_the_end"]["codes"] < 0.05 * found["moved"] and found["at_the_end"]["largest"] <= 1
