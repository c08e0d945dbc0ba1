"""How a local run ends, through `qarl train`: each end with each shape of evaluation. The engine and the update are
stand-ins; the policy, the rewards, the checkpoints and the export are real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import BOOM, FAILING, STEPS, End, cells, check_end, restored_limit, write_run
from random_models import save_random_model

from qarl.checkpoint.export_folder import MARK, why_foreign
from qarl.checkpoint.resumable import _digest
from qarl.eval.arguments import note_unfinished
from qarl.metrics.tracker import read_metrics
from qarl.rollout.engine import EngineFailed, RolloutEngine
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch
from qarl.train import main
from qarl.trainer import finish, loop
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("no_probe")


class Engine:
    """Answers each prompt with the same two tokens. `lost`: it fails."""

    lost = False
    weight_version = 0
    rebuilds = 0
    publish_from: Any = RolloutEngine.publish_from

    def __enter__(self) -> Engine:
        return self

    __exit__: Any = RolloutEngine.__exit__

    def close(self) -> None:
        if self.lost:
            raise RuntimeError("a lost engine cannot be closed")

    def publish(self, tensors: Any, *, version: int, prepared: Any) -> PublishReport:
        self.weight_version = version
        return PublishReport(version, len(list(tensors)), 1000, 0, 0, {})

    def generate(self, prompts: list[list[int]], sampling: Any, seeds: Any = None) -> RolloutBatch:
        if self.lost:
            raise EngineFailed("the rollout engine is lost", why="vLLM failed: killed")
        count = len(prompts)
        return RolloutBatch(
            prompts, [[5, 1]] * count, [[-1.0, -1.0]] * count, ["stop"] * count, self.weight_version
        )

    def sleep(self) -> None:
        pass


class Trainer(LocalTrainer):
    """Samples and scores, but does not update. `at_step`: what happens in each step."""

    def __init__(self, config: Any, parts: Any) -> None:
        super().__init__(config, parts, engine=Engine())  # type: ignore[arg-type]

    def train_step(self) -> dict[str, float]:
        self.step += 1
        self.at_step(self)
        _, metrics = self.rollout_of_step()
        self.publish()
        return metrics | {
            "actor/skipped_steps": 0,
            "mismatch/k3": float("nan"),
            "timing_s/step": 1.0,
        }

    def rollout_of_step(self) -> tuple[Any, dict[str, float]]:
        self.engine.weight_version = self.step
        return self.rollout()

    def at_step(self, trainer: Trainer) -> None:
        pass


def at(step: int, action: Callable[[Trainer], Any]) -> Callable[..., None]:
    def happen(self: Trainer, trainer: Trainer) -> None:
        if trainer.step == step:
            action(trainer)

    return happen


def fail(trainer: Trainer) -> None:
    raise RuntimeError(BOOM)


def interrupt(*arguments: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_twice(*arguments: Any) -> None:
    interrupt()
    interrupt()


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
    if name == "Ctrl-C":
        assert [path.name for path in Path("runs/bad/checkpoints").iterdir()] == ["step_2"]
        assert summary()["steps"] == 2


def summary() -> dict[str, Any]:
    return json.loads(Path("runs/bad/summary.json").read_text())


@pytest.fixture
def train(startable_run, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """`qarl train` of a run with one data source. Returns the exit code and what it printed."""
    monkeypatch.setattr(loop, "LocalTrainer", Trainer)
    settings = write_run("one source")

    def run(*overrides: str) -> tuple[int, str]:
        code = main(["config=run.yaml", *settings, *overrides])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return code, printed.out + printed.err

    return run


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


RUN = Path("runs/bad")


def put(name: str, kind: str) -> Path:
    """Put a file, or a folder with a file, of the user into the run folder. Return the file."""
    path = RUN / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    file = path / "thesis.tex" if kind == "folder" else path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    return file


TAKEN = {
    "export": ("file", "folder"),
    "plots": ("file", "folder"),
    "tensorboard": ("file",),
    "report.html": ("file", "folder"),
    "samples.jsonl": ("file", "folder"),
    "config.yaml": ("folder",),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in TAKEN.items() for kind in kinds]
)
def test_a_name_that_is_taken_is_refused_before_the_weights_are_loaded(train, name, kind):
    file = put(name, kind)
    code, printed = train()
    assert code == 2 and f"error: {RUN / name} is in the way of the run" in printed
    assert printed.count("error: ") == 1 and "fix: move it away" in printed
    assert "loading the weights" not in printed and file.read_text() == "mine"
    assert {path.name for path in RUN.iterdir()} == {".lock", name}


def test_a_resume_refuses_an_export_that_is_none_and_a_new_run_moves_everything_aside(
    train, monkeypatch
):
    monkeypatch.setattr(Trainer, "at_step", at(2, interrupt))
    assert train("trainer.save_freq=2")[0] == 130
    assert (RUN / "export" / MARK).is_file()
    (RUN / "export" / "notes").write_text("mine")
    code, printed = train("trainer.save_freq=2")
    assert code == 2 and "no export wrote its file notes" in printed
    monkeypatch.setattr(Trainer, "at_step", at(0, fail))
    assert train("trainer.save_freq=2", "trainer.resume_mode=disable")[0] == 0
    assert Path("runs/bad.1/export/notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("export", "file", "the model was exported to runs/bad/export.1"),
        ("export", "folder", "the model was exported to runs/bad/export.1"),
        ("plots", "file", "has the name runs/bad/plots now"),
        ("report.html", "folder", "has the name runs/bad/report.html now"),
        ("metrics.jsonl", "folder", "has the name runs/bad/metrics.jsonl now"),
    ],
)
def test_a_name_that_is_taken_during_the_run_costs_neither_its_file_nor_the_model(
    train, monkeypatch, name, kind, words
):
    files = []
    monkeypatch.setattr(Trainer, "at_step", at(2, lambda trainer: files.append(put(name, kind))))
    code, printed = train("trainer.plots=true")
    assert code == 2 and printed.count("error: ") == 1 and words in printed, printed
    assert files[0].read_text() == "mine"
    ended = summary()
    assert name in ended["failed"] and why_foreign(Path(ended["checkpoint"])) is None
    assert ended["checkpoint"] == str(RUN / ("export.1" if name == "export" else "export"))
    assert not list(RUN.glob("*.old-*"))


def lose(how: str) -> None:
    if how == "deleted":
        shutil.rmtree(RUN)
    else:
        RUN.rename("runs/moved")
    if how == "replaced":
        put("metrics.jsonl", "file")


@pytest.mark.parametrize(
    ("how", "step"), [("deleted", 1), ("deleted", STEPS), ("moved", 2), ("replaced", 2)]
)
def test_a_run_without_its_folder_ends_with_one_error_and_loses_no_weights(
    train, monkeypatch, how, step
):
    monkeypatch.setattr(Trainer, "at_step", at(step, lambda trainer: lose(how)))
    code, printed = train("trainer.save_freq=1", "trainer.plots=true")
    assert code == 2 and printed.count("error: ") == 1, printed
    assert f"error: the run folder {RUN} was deleted or moved during the run" in printed
    new = Path("runs/bad.1") if how == "replaced" else RUN
    assert sorted(path.name for path in new.iterdir()) == ["export", "summary.json"]
    ended = json.loads((new / "summary.json").read_text())
    assert ended["finished"] is False and ended["steps"] == step
    assert "was deleted or moved during the run" in ended["failed"]
    assert ended["checkpoint"] == str(new / "export") and why_foreign(new / "export") is None
    if how == "replaced":
        assert (RUN / "metrics.jsonl").read_text() == "mine"
    assert f"its export among them, are in {new}\n" in printed
    if how != "deleted":
        commands = printed.partition("before you repeat the command: ")[2].splitlines()[0]
        subprocess.run(commands, shell=True, check=True)
        assert (RUN / "config.yaml").is_file() and not Path("runs/moved").exists()


@pytest.mark.parametrize("gone", ["export", "run folder"])
def test_what_is_deleted_while_the_last_files_are_written_is_not_claimed(train, monkeypatch, gone):
    lost = RUN / "export" if gone == "export" else RUN
    monkeypatch.setattr(finish, "write_report", lambda run_dir: shutil.rmtree(lost))
    code, printed = train()
    assert code == 2 and printed.count("error: ") == 1 and "was deleted or moved" in printed
    ended = summary()
    assert ended["finished"] is False and "checkpoint" not in ended
    assert "was deleted or moved" in ended["failed"] and "export" in ended["not_exported"]


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
    assert code == 2 and "there is no room for runs/bad/export" in printed
    assert "loading the weights" not in printed and not RUN.exists()
    assert train("trainer.save_final=false", "trainer.save_minutes=-1")[0] == 0
