"""Whole verl runs that are ended from outside: by Ctrl-C, by kill -9 of one of their processes, by lost files.

Each says one cause, leaves no process and no broken checkpoint, and goes on when its command is repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from cpu_features import needs_vllm_cpu, needs_w4a16_cpu
from killed_runs import ENGINE, RANK, SETTINGS, KilledRun, kill, kill_the_command

from qarl.checkpoint.read_weights import whole_and_torn
from qarl.metrics.tracker import read_metrics

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")
pytestmark = [needs_w4a16_cpu, needs_vllm_cpu, pytest.mark.timeout(1500)]

STEPS = int(str(SETTINGS["trainer.total_training_steps"]))


class End(NamedTuple):
    """`act`: ends a run that has just been started. `code`: its exit code. `said`: words that it prints."""

    act: Callable[[KilledRun], object]
    code: int
    said: str


def delete_the_folder(run: KilledRun) -> None:
    run.wait_for_step()
    while run.run_dir.exists():  # a rank may be writing its checkpoint
        shutil.rmtree(run.run_dir, ignore_errors=True)


def interrupt_before_the_first_step(run: KilledRun) -> None:
    run.wait_for(lambda: run.named(RANK))
    run.interrupt()


def close_the_terminal(run: KilledRun) -> None:
    run.wait_for_step()
    run.hang_up()


def interrupt_the_last_evaluation(run: KilledRun) -> None:
    """verl evaluates after it has saved the last step and before it logs it."""
    newest = run.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    run.wait_for(lambda: newest.is_file() and newest.read_text() == str(STEPS))
    assert f"step {STEPS}/" not in run.printed, "the evaluation was over"
    run.interrupt()


def go_through(folder: Path, ends: Sequence[End], *overrides: str) -> None:
    """Start the run once for each of its `ends`, in the same folder."""
    for end in ends:
        with KilledRun(folder, *overrides) as run:
            end.act(run)
            assert run.wait() == end.code, run.printed[-3000:]
            assert run.orphans() == []
            assert end.said in run.printed, run.printed[-3000:]
            assert len(run.errors) == (end.code == 2), run.errors


def finish(folder: Path, *overrides: str) -> str:
    """Run to the end. Return what the run printed."""
    with KilledRun(folder, *overrides) as run:
        assert run.wait() == 0, run.printed[-3000:]
        assert run.orphans() == []
        assert run.summary["finished"] is True and run.summary["steps"] == STEPS
        assert (run.run_dir / "export" / "model.safetensors").is_file()
        return run.printed


def test_an_interrupt_and_a_killed_command(tmp_path):
    ends = [
        End(interrupt_before_the_first_step, 130, "stopping verl now"),
        End(kill_the_command, -9, "start: fresh"),
        End(close_the_terminal, 129, "stopping verl now"),
    ]
    go_through(tmp_path, ends)
    finish(tmp_path)


def test_an_interrupt_in_the_last_evaluation_costs_no_step(tmp_path):
    evaluates = ["trainer.test_freq=6", "data.max_response_length=64"]
    said = f"it resumes after step {STEPS}"
    go_through(tmp_path, [End(interrupt_the_last_evaluation, 130, said)], *evaluates)
    run_dir = tmp_path / "quickstart_verl"
    ended = json.loads((run_dir / "summary.json").read_text())
    assert ended["interrupted"] is True and ended["finished"] is False
    assert not (run_dir / "export").exists()
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all("critic/score/mean" in row for row in rows)
    assert ["timing_s/publish" in row for row in rows] == [True] * (STEPS - 1) + [False]
    printed = finish(tmp_path, *evaluates)
    assert "\nstep 1/" not in printed and f"\nstep {STEPS}/" in printed, printed[-3000:]
    ended = json.loads((run_dir / "summary.json").read_text())
    assert ended["accuracy_after"] is not None


def test_killed_processes_and_a_lost_file_of_a_rank(tmp_path):
    ranks = "trainer.n_gpus_per_node=2"
    ends = [
        End(kill(ENGINE), 2, "error: a process that generates has stopped"),
        End(kill(RANK), 2, "error: a process of the verl run died"),
    ]
    go_through(tmp_path, ends, ranks)
    whole, _ = whole_and_torn(tmp_path / "quickstart_verl" / "checkpoints")
    *_, before, newest = [whole[step] for step in sorted(whole)]
    (newest / "actor" / "model_world_size_2_rank_1.pt").unlink()
    printed = finish(tmp_path, ranks)
    assert f"note: {newest.name} is incomplete" in printed
    assert f"start: resumes from {before}" in printed


def test_a_folder_that_is_deleted(tmp_path):
    said = "was deleted or moved during the run"
    go_through(tmp_path, [End(delete_the_folder, 2, said)])
