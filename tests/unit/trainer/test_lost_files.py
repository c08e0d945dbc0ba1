"""A run whose folder, or a name in it, is taken or lost, through `qarl train`. The engine and the update are
stand-ins."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from ends import STEPS
from local_ends import RUN, Trainer, at, fail, interrupt, put, summary

from qarl.checkpoint.export_folder import MARK, why_foreign
from qarl.trainer import finish

pytestmark = pytest.mark.usefixtures("no_probe")


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
