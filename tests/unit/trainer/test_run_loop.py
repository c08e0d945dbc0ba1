"""Around the steps of a run: Ctrl-C, a full disk at the end. The steps themselves do nothing; no engine."""

from __future__ import annotations

import json
import signal

import pytest
from engine_helpers import config
from idle_trainer import Checkpoints, Trainer

from qarl.checkpoint.storage import StorageError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.metrics.tracker import Tracker
from qarl.trainer import loop
from qarl.trainer.loop import run_and_keep, run_steps
from qarl.trainer.stop import Stop

pytestmark = pytest.mark.usefixtures("in_the_checkout", "no_probe")
OVERRIDES = [
    "trainer.total_training_steps=3",
    "trainer.logger=[]",
    "trainer.plots=false",
    "trainer.test_freq=2",
]


def test_ctrl_c_during_an_evaluation_makes_that_step_the_last_and_warnings_are_shown(
    tmp_path, monkeypatch, capsys
):
    trainer, checkpoints = (
        Trainer(config(tmp_path, *OVERRIDES, "trainer.val_before_train=false")),
        Checkpoints(),
    )
    monkeypatch.setattr(trainer, "evaluate", lambda: signal.raise_signal(signal.SIGINT) or {})
    with Tracker(tmp_path / "run", [], 3, {}) as tracker, Stop() as stop:
        run_steps(trainer, checkpoints, tracker, stop, 0.0)
    assert checkpoints.after == [False, True]
    assert capsys.readouterr().err.count(": the mismatch is over its limit") == 2


def test_a_probe_that_fails_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    def disagree(trainer: Trainer) -> str:
        raise MismatchError("trainer and engine disagree")

    monkeypatch.setattr(loop, "probe", disagree)
    trainer = Trainer(config(tmp_path, *OVERRIDES, "trainer.save_final=false"))
    with pytest.raises(MismatchError):
        run_and_keep(trainer, Checkpoints(), Stop(), 0.0)
    assert trainer.step == 0
    summary = json.loads((trainer.config.run_dir / "summary.json").read_text())
    assert summary["finished"] is False and "trainer and engine disagree" in summary["failed"]


def test_without_room_for_the_export_no_step_is_taken(tmp_path):
    trainer = Trainer(config(tmp_path, *OVERRIDES), published=10**18)
    with pytest.raises(StorageError, match=r"no room for .*export"):
        run_and_keep(trainer, Checkpoints(), Stop(), 0.0)
    assert trainer.step == 0


@pytest.mark.parametrize("saved", [False, True])
def test_an_export_that_fails_says_what_there_still_is(tmp_path, saved):
    settings = config(tmp_path, *OVERRIDES)
    if saved:
        (settings.run_dir / "checkpoints" / "step_2").mkdir(parents=True)
    with pytest.raises(StorageError, match="after step 3 could not be exported") as caught:
        run_and_keep(Trainer(settings, full=True), Checkpoints(), Stop(), 0.0)
    message = str(caught.value)
    assert "File too large" in message and "metrics and summary are in" not in message
    assert ("the newest checkpoint is" in message and "step_2" in message) is saved
    assert ("the weights are lost" in message) is not saved
    summary = json.loads((settings.run_dir / "summary.json").read_text())
    assert summary["finished"] is False and "could not be exported" in summary["failed"]
