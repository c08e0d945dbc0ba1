"""scripts/verl_resume_check.py: what it says of a killed run and its continuation, whose processes are left out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import verl_resume_check

VERIFIED = b"rank 0: resumed state equals the saved one by checksum: 193 parts, 0f (of model, optimizer, extra)\n"


def check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, said: bytes = VERIFIED, steps: Sequence[int] = range(1, 6),
    asked: str = "5", ended: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A run killed after step 5, with a checkpoint of step 4; `steps`: those whose prompts were written down."""
    for side, prompts in (("killed", {step: asked if step == 5 else "" for step in steps}), ("resumed", {5: "5"})):
        (folder / f"kill.{side}").mkdir()
        for step, prompt in prompts.items():
            (folder / f"kill.{side}/{step}.jsonl").write_text(json.dumps({"input": prompt}) + "\n")

    def resume(command: list[str], stdout: Any, stderr: int) -> subprocess.CompletedProcess[bytes]:
        stdout.write(said)
        logged.append(8)
        return subprocess.CompletedProcess(command, 0)

    logged = [5]
    monkeypatch.setattr(verl_resume_check, "run_and_kill", lambda *args: ended or {})
    monkeypatch.setattr(verl_resume_check, "logged_steps", lambda run: logged[-1])
    monkeypatch.setattr(verl_resume_check, "last_checkpoint", lambda run: 8 if logged[-1] == 8 else 4)
    monkeypatch.setattr(subprocess, "run", resume)
    return verl_resume_check.check("kill", argparse.Namespace(runs=str(folder), ranks=1, overrides=[]), 1.0)


def test_a_run_that_went_on_as_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(tmp_path, monkeypatch)
    assert found["ok"] and found["steps_with_equal_prompts"] == [5] and found["resumed_from"] == 4


def test_the_last_prompts_may_be_lost_in_the_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(tmp_path, monkeypatch, steps=range(1, 5))
    assert found["ok"] and found["steps_with_equal_prompts"] == []


@pytest.mark.parametrize("wrong", [{"said": b""}, {"asked": "other"}, {"steps": ()}, {"ended": {"ended": False}}])
def test_what_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    """Nothing verified; other prompts; prompts that nobody wrote down; a signal without its answer."""
    assert not check(tmp_path, monkeypatch, **wrong)["ok"]
