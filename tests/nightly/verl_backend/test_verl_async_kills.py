"""Whole runs with an engine of its own that are ended by kill -9 of one process, and resumed by the same command.

Nothing is lost or mixed: every step is made once, δ of each token against the weights that sampled it is 0, and none is
older than the bound."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from killed_runs import ENGINE, RANK, SENDER, SETTINGS, KilledRun, kill, kill_the_command

from qarl.checkpoint.read_weights import whole_and_torn
from qarl.metrics.tracker import read_metrics
from qarl.verl.saving import QUEUE

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, needs_vllm_cpu, pytest.mark.timeout(1500)]

CONFIG = "quickstart_async"
STEPS = int(str(SETTINGS["trainer.total_training_steps"]))
OVERRIDES = ("actor.old_log_probs_sample=1.0",)


def lose_the_queue(run_dir: Path) -> str:
    """Delete the responses that wait from the newest checkpoint. Return what the resume says of it."""
    whole, _ = whole_and_torn(run_dir / "checkpoints")
    newest = whole[max(whole)]
    shutil.rmtree(newest / QUEUE)
    return f"note: {newest.name} is incomplete"


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        (kill(ENGINE), 2, "error: a process that generates has stopped"),
        (
            kill(SENDER),
            2,
            "error: (a process of the verl run died|a process that generates has stopped"
            "|a rollout engine stopped answering)",  # depends on who notices it first
        ),
        (kill(RANK), 2, "error: a process of the verl run died"),
        (kill_the_command, -9, "start: fresh"),
    ],
    ids=["engine", "sender", "rank", "command"],
)
def test_a_killed_run_goes_on(
    tmp_path: Path, act: Callable[[KilledRun], None], code: int, said: str
) -> None:
    with KilledRun(tmp_path, *OVERRIDES, config=CONFIG) as run:
        act(run)
        assert run.wait() == code, run.printed[-3000:]
        assert run.orphans() == []
        assert re.search(said, run.printed), run.printed[-3000:]
        assert len(run.errors) == (code == 2), run.errors
    finished(tmp_path)


def test_a_checkpoint_without_its_queue_is_passed_over(tmp_path: Path) -> None:
    with KilledRun(tmp_path, *OVERRIDES, config=CONFIG) as run:
        run.wait_for(lambda: "\nstep 3/" in run.printed)
        run.look()
        run.process.kill()
        run.wait()
        assert run.orphans() == []
        note = lose_the_queue(run.run_dir)
    assert note in finished(tmp_path)


def finished(folder: Path) -> str:
    """Run to the end. Return what the run printed."""
    with KilledRun(folder, *OVERRIDES, config=CONFIG) as run:
        assert run.wait() == 0, run.printed[-3000:]
        assert run.orphans() == []
        assert "resumed state equals the saved one by checksum" in run.printed
        assert run.summary["finished"] is True and run.summary["steps"] == STEPS
        assert (run.run_dir / "export" / "model.safetensors").is_file()
        steps = [entry for entry in read_metrics(run.run_dir) if "staleness/age_max" in entry]
        assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
        for entry in steps:
            assert "critic/score/mean" in entry and entry["timing_s/step"] > 0
            assert entry["staleness/age_max"] <= 1
            compared = entry["staleness/checked_frac"] > 0
            assert entry.get("mismatch/of_version_abs_max") == (0.0 if compared else None)
        assert steps[0]["staleness/checked_frac"] == 1.0
        return run.printed
