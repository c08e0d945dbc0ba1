"""scripts/warning_signs.py: when a reward has fallen, what a run shows, and which result is the wanted one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("warning_signs")


def history(rewards: Sequence[float], **metrics: float) -> list[dict[str, Any]]:
    return [{"step": step, "critic/score/mean": value, **metrics} for step, value in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.4] * 20, None),
        ([0.4] * 5 + [0.0] * 5, 8),  # means of five: 0.4, 0.32, 0.24, 0.16
        ([0.4] * 5 + [0.2] * 20, None),  # exactly half is not below half
        ([0.4] * 5 + [0.0, 0.0, 0.4] * 5, 9),  # 0.4, 0.32, 0.24, 0.24, 0.16
        ([0.0] * 20, None),
        ([0.1] * 10 + [0.4] * 10 + [0.15] * 10, 25),  # the peak counts, not the start: 0.2 at step 24, 0.15 at 25
        ([0.4] * 4, None),
    ],
)
def test_the_step_at_which_a_reward_falls(script: Any, rewards: list[float], step: int | None) -> None:
    assert script.fell_at(history(rewards)) == step
    assert script.fell_at([{"step": 0, "val/accuracy": 0.3}, *history(rewards)]) == step


def test_what_a_run_shows(script: Any) -> None:
    found = script.judged(history([0.1] * 10 + [0.3] * 10, **{"actor/update_size": 0.31}))
    assert (found["steps"], found["reward_fell_at_step"]) == (20, None)
    assert (found["reward_first_10"], found["reward_last_10"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert [(one["sign"], one["step"], one["since_step"]) for one in found["warnings"]] == [("update_size", 5, 1)]


@pytest.mark.parametrize(
    ("kind", "fell", "warned", "good"),
    [
        ("healthy", None, [], True),
        ("healthy", None, [30], False),
        ("healthy", 30, [], False),
        ("collapse", 30, [29, 40], True),
        ("collapse", 30, [30], False),
        ("collapse", 30, [], False),
        ("collapse", None, [30], False),
    ],
)
def test_which_result_is_the_wanted_one(
    script: Any, kind: str, fell: int | None, warned: list[int], good: bool
) -> None:
    result = {"reward_fell_at_step": fell, "warnings": [{"step": step} for step in warned]}
    assert script.as_it_should(kind, result) is good


def test_a_finished_run_is_kept_and_another_one_refused(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: Sequence[str], check: bool) -> None:
        calls.append(command)
        folder = tmp_path / "healthy-seed0"
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, history([0.3] * 12))))
        (folder / "summary.json").write_text(json.dumps({"finished": True, "seconds": 7.0}))

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    for _ in range(2):
        assert script.train("healthy", 0, 12, tmp_path)["seconds"] == 7.0
    assert len(calls) == 1 and "trainer.total_training_steps=12" in calls[0]
    with pytest.raises(SystemExit, match="other arguments"):
        script.train("healthy", 0, 60, tmp_path)
    assert len(calls) == 1


def test_the_signs_of_finished_runs_are_written(script: Any, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "found.json"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history([0.4] * 5 + [0.0] * 5)))
    (run / "versions.json").write_text('{"git_commit": "abc"}')
    assert script.main(["--history", str(run), "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["versions"] == {"git_commit": "abc"} and found["runs"]["run"]["reward_fell_at_step"] == 8
