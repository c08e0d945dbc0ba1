"""Around the steps of a run: Ctrl-C, a full disk at the end. The steps themselves do nothing; no engine."""

from __future__ import annotations

import json
import signal

import pytest
from engine_helpers import config
from idle_trainer import Checkpoints, Trainer

from qarl.checkpoint.storage import StorageError
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import MismatchError
from qarl.metrics.tracker import Tracker, read_metrics
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


@pytest.mark.parametrize(
    ("step", "keys", "again"),
    [
        (3, [], True),
        (2, [], True),
        (1, [], False),
        (3, ["val/accuracy"], False),
        (2, ["val/accuracy"], False),
    ],
)
def test_an_evaluation_that_the_metrics_lack_is_made_at_the_resume(
    tmp_path, capsys, step, keys, again
):
    """Of steps 2 and 3, which are evaluated: the run ended in it, or test_freq is new. Step 3 is the last one."""
    trainer = Trainer(config(tmp_path, *OVERRIDES))
    trainer.config.run_dir.mkdir(parents=True)
    metrics = trainer.config.run_dir / "metrics.jsonl"
    lines = [{"step": made, "timing_s/step": 1.0} for made in range(1, step + 1)]
    lines[-1] |= dict.fromkeys(keys, 0.25)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trainer.step = step
    calls = []
    trainer.evaluate = lambda: calls.append(trainer.step) or {"val/accuracy": 0.5}
    with Tracker(trainer.config.run_dir, [], 3, {}, start_step=step) as tracker, Stop() as stop:
        run_steps(trainer, Checkpoints(), tracker, stop, 0.0)
    assert (f"after step {step}, which has no figures yet" in capsys.readouterr().err) is again
    assert calls == [step] * again + [made for made in (2, 3) if made > step]
    accuracies = {
        entry["step"]: entry.get("val/accuracy") for entry in read_metrics(metrics.parent)
    }
    assert accuracies[3] is not None and (step < 2 or accuracies[step] == (0.5 if again else 0.25))


def test_a_run_that_fails_says_where_its_model_is(tmp_path, capsys):
    settings = config(tmp_path, *OVERRIDES)
    (settings.run_dir / "checkpoints" / "step_2").mkdir(parents=True)

    def fail(step: int) -> None:
        if step == 3:
            raise UserError("the reward failed")

    with pytest.raises(UserError, match="the reward failed"):
        run_and_keep(Trainer(settings, on_step=fail), Checkpoints(), Stop(), 0.0)
    said = capsys.readouterr().err
    assert f"of 3 was exported to {settings.run_dir / 'export'}" in said
    assert f"its newest checkpoint is {settings.run_dir / 'checkpoints' / 'step_2'}" in said
    assert "resumes" not in said  # with trainer.resume_mode=disable the same command starts anew
