"""How a local run ends, through `qarl train`: each end with each shape of evaluation. The engine and the update are
stand-ins; the policy, the rewards, the checkpoints and the export are real."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import BOOM, FAILING, STEPS, End, cells, check_end, restored_limit, write_run
from local_ends import (
    RUN,
    Trainer,
    at,
    close_the_terminal,
    fail,
    interrupt,
    interrupt_twice,
    summary,
)
from random_models import save_random_model

from qarl.checkpoint.export_folder import MARK, why_foreign
from qarl.checkpoint.resumable import _digest
from qarl.eval.arguments import note_unfinished
from qarl.metrics.tracker import read_metrics
from qarl.train import main
from qarl.trainer import finish, loop
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("no_probe", "hang_ups_are_forgotten")


ENDS: dict[str, tuple[Callable[..., None], End]] = {
    "finished": (at(0, fail), End(0, finished=True)),
    "an error of the program": (at(2, fail), End(1, failed=f"RuntimeError: {BOOM}")),
    "an error of the reward": (
        at(2, lambda trainer: FAILING.touch()),
        End(2, said="no verdict", failed="no verdict"),
    ),
    "Ctrl-C": (at(2, interrupt), End(130)),
    "Ctrl-C twice": (
        at(2, interrupt_twice),
        End(
            130, failed="KeyboardInterrupt", export=False, not_exported="interrupted within a step"
        ),
    ),
    "SIGHUP": (at(2, close_the_terminal), End(129)),
    "a lost engine": (
        at(2, lambda trainer: setattr(trainer.engine, "lost", True)),
        End(2, said="the rollout engine is lost", failed="the rollout engine is lost"),
    ),
    "a full disk": (
        at(STEPS, lambda trainer: trainer.fill_the_disk()),
        End(
            2,
            said="could not be exported",
            failed="could not be exported",
            export=False,
            not_exported="File too large",
        ),
    ),
}


def evaluate_to_nan(trainer: LocalTrainer) -> dict[str, float]:
    return {"val/accuracy": float("nan"), "val/accuracy/a": float("nan"), "val/accuracy/b": 0.5}


@pytest.mark.parametrize(("name", "shape"), cells(ENDS))
def test_every_end_with_every_shape_of_evaluation(startable_run, monkeypatch, capsys, name, shape):
    at_step, end = ENDS[name]
    monkeypatch.setattr(Trainer, "at_step", at_step)
    monkeypatch.setattr(loop, "LocalTrainer", Trainer)
    if shape == "not a number":
        monkeypatch.setattr(Trainer, "evaluate", evaluate_to_nan)
    plots = "trainer.plots=" + (
        "true" if name in ("finished", "an error of the program") else "false"
    )
    with restored_limit() as fill_the_disk:
        monkeypatch.setattr(
            Trainer, "fill_the_disk", lambda trainer: fill_the_disk(), raising=False
        )
        try:
            code = main(["config=run.yaml", *write_run(shape), plots])
        except RuntimeError as error:  # Python shows it with its traceback, and ends with 1
            assert str(error) == BOOM
            code = 1
    printed = capsys.readouterr()
    check_end(Path("runs/bad"), end, shape, code, printed.out + printed.err)
    if name in ("Ctrl-C", "SIGHUP"):
        assert [path.name for path in Path("runs/bad/checkpoints").iterdir()] == ["step_2"]
        assert summary()["steps"] == 2


def test_an_export_that_found_no_room_is_made_by_the_same_command_without_another_step(
    train, monkeypatch
):
    save = Policy.save
    with restored_limit() as fill_the_disk:

        def save_on_a_full_disk(*arguments: Any) -> Path:
            fill_the_disk()
            return save(*arguments)

        monkeypatch.setattr(Policy, "save", save_on_a_full_disk)
        code, printed = train("trainer.save_freq=3")
        assert (
            code == 2
            and "the newest checkpoint is" in printed
            and "could not be exported" in printed
        )
    monkeypatch.setattr(Policy, "save", save)
    monkeypatch.setattr(Trainer, "at_step", at(STEPS, fail))
    code, printed = train("trainer.save_freq=3")
    assert code == 0 and "resumes from" in printed
    assert Path("runs/bad/export/model.safetensors").is_file()
    ended = summary()
    assert ended["finished"] is True and ended["steps"] == STEPS
    assert ended["accuracy_before"] == ended["accuracy_after"] == 0.5


def test_an_evaluation_that_fails_loses_neither_the_step_nor_its_checkpoint(train, monkeypatch):
    evaluate = Trainer.evaluate

    def evaluate_badly(trainer: Trainer) -> dict[str, float]:
        if trainer.step == 2:
            FAILING.touch()
        return evaluate(trainer)

    monkeypatch.setattr(Trainer, "evaluate", evaluate_badly)
    code, printed = train("trainer.save_freq=2")
    assert code == 2 and "no verdict" in printed
    assert [path.name for path in Path("runs/bad/checkpoints").iterdir()] == ["step_2"]
    assert [entry["step"] for entry in read_metrics("runs/bad")] == [0, 1, 2]
    FAILING.unlink()
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    assert train("trainer.save_freq=2")[0] == 0
    assert summary()["steps"] == STEPS and summary()["accuracy_after"] == 0.5


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after an error"])
@pytest.mark.parametrize("file", ["export", "plots", "report"])
def test_an_interrupt_while_the_last_files_are_written_hides_no_cause(
    train, monkeypatch, file, first
):
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    owner, name = {
        "export": (Policy, "save"),
        "plots": (finish, "plot_run"),
        "report": (finish, "write_report"),
    }[file]
    monkeypatch.setattr(owner, name, stop)
    if first:
        monkeypatch.setattr(Trainer, "at_step", at(2, lambda trainer: FAILING.touch()))
    code, printed = train()
    assert code == 130 and printed.endswith("interrupted\n") and ("no verdict" in printed) is first
    ended = summary()
    assert ended["interrupted"] is True and ended["finished"] is (file != "export" and not first)
    assert ("no verdict" in (ended["failed"] or "")) is first


def test_an_export_that_an_earlier_part_left_is_named_with_its_step(train, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "at_step", at(2, interrupt))
    assert train("trainer.save_freq=2")[0] == 130
    assert json.loads((RUN / "export" / MARK).read_text())["step"] == 2
    assert why_foreign(RUN / "export") is None
    monkeypatch.setattr(Trainer, "at_step", at(0, fail))
    monkeypatch.setattr(Policy, "save", interrupt_twice)
    code, printed = train("trainer.save_freq=2")
    why = summary()["not_exported"]
    assert code == 130 and summary()["steps"] == STEPS and "checkpoint" not in summary()
    assert f"{RUN / 'export'} is still the one of step 2" in why
    assert f"note: there is no export of step {STEPS}: {why}\n" in printed
    note_unfinished(RUN)
    assert why in capsys.readouterr().err
    (RUN / "summary.json").unlink()
    note_unfinished(RUN)
    assert "its export is of step 2" in capsys.readouterr().err


def test_what_ends_the_program_during_a_run_is_an_error_of_the_run(train, monkeypatch):
    monkeypatch.setattr(Trainer, "at_step", at(2, lambda trainer: sys.exit(0)))
    with pytest.raises(RuntimeError, match=r"something in the run called sys\.exit\(0\)"):
        train()
    assert "sys.exit(0)" in summary()["failed"] and summary()["finished"] is False


def test_a_checkpoint_to_resume_from_is_checked_before_the_weights_are_loaded(train, monkeypatch):
    monkeypatch.setattr(Trainer, "at_step", at(2, interrupt))
    assert train("trainer.save_freq=2", "name=first")[0] == 130
    monkeypatch.setattr(Trainer, "at_step", at(0, fail))
    good = Path("runs/first/checkpoints/step_2")
    Path("verl/actor").mkdir(parents=True)
    shutil.copytree(good, "half")
    Path("half/model.safetensors").unlink()
    shutil.copytree(good, "older")
    state = json.loads(Path("older/state.json").read_text())
    del state["inputs"], state["digest"]  # as a checkpoint without a record of its inputs
    state["digest"] = _digest(state)
    Path("older/state.json").write_text(json.dumps(state))
    cases = {
        "runs/nowhere": "there is no such folder",
        "run.yaml": "it is a file",
        "model": "it has no state.json",
        "verl": "it is a checkpoint of backend=verl",
        "runs/first": f"such as {good}",
        "half": "model.safetensors cannot be read",
    }

    def refused(path: str, words: str, *overrides: str) -> None:
        keys = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}", *overrides]
        code, printed = train("name=second", *keys)
        assert code == 2 and words in printed and printed.count("error: ") == 1, printed
        assert "loading the weights" not in printed and not Path("runs/second").exists()

    for path, words in cases.items():
        refused(path, words)
    refused(str(good), "the config changes what is trained", "optim.lr=0.5")
    shutil.rmtree("model")
    save_random_model(Path("model"), tie=True, intermediate_size=64)
    refused("older", "the checkpoint belongs to a different model")


def test_a_disk_that_is_read_only_or_full_is_refused_before_the_weights_are_loaded(
    train, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        code, printed = train()
        assert code == 2 and "the config cannot be written" in printed
        assert "cannot be written to" in printed and "checking data" not in printed
    room = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    code, printed = train()
    assert code == 2 and "there is no room for runs/bad\n" in printed
    assert "loading the weights" not in printed and not RUN.exists()
    assert train("trainer.save_final=false", "trainer.save_minutes=-1")[0] == 0
