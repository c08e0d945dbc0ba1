"""When a run saves: by steps, by time, and at Ctrl-C and SIGTERM, which are answered at once. The steps do nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_state import interrupted_run, write_bare
from engine_helpers import config
from idle_trainer import Trainer

from qarl import hangup
from qarl.checkpoint.resumable import open_checkpoint
from qarl.diagnose.diagnosis import with_keys
from qarl.metrics.tracker import Tracker
from qarl.trainer import checkpoints as checkpointing
from qarl.trainer.checkpoints import Checkpoints
from qarl.trainer.loop import run_and_keep, run_steps
from qarl.trainer.resume import open_run
from qarl.trainer.stop import Stop

pytestmark = pytest.mark.usefixtures("in_the_checkout", "no_probe")
QUIET = ["trainer.logger=[]", "trainer.plots=false", "trainer.report=false", "trainer.test_freq=2"]
BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def plain_handlers() -> Iterator[None]:
    """Ray, which another test may have started in this process, leaves a handler of SIGTERM behind."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a trainer whose steps take `minutes`, and whose checkpoints are bare folders. `saved` has their steps."""

    def make(*overrides: str, minutes: float = 0, **keys: Any) -> Any:
        trainer: Any = Trainer(config(tmp_path, *QUIET, *overrides), **keys)
        trainer.saved = []
        clock = SimpleNamespace(
            monotonic=lambda: 60 * minutes * trainer.step, perf_counter=time.perf_counter
        )

        def save(folder: Path, **parts: Any) -> int:
            write_bare(folder, step=trainer.step, config=trainer.config.model_dump(mode="json"))
            trainer.saved.append(trainer.step)
            return 0

        monkeypatch.setattr(checkpointing, "time", clock)
        monkeypatch.setattr(checkpointing, "save_checkpoint", save)
        monkeypatch.setattr(checkpointing, "forward_weights", lambda policy: [])
        monkeypatch.setattr(checkpointing, "training_state", lambda *_: {})
        monkeypatch.setattr(
            checkpointing, "restore", lambda trainer, saved: setattr(trainer, "step", saved.step)
        )
        return trainer

    return make


def run(trainer: Any, start: Any = None) -> list[str]:
    with Tracker(trainer.config.run_dir, [], 9, {}) as tracker, Stop() as stop:
        run_steps(trainer, Checkpoints(trainer, start), tracker, stop, 0.0)
    folder = trainer.config.run_dir / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# Keys, minutes of a step, the step in which Ctrl-C comes, the steps that are saved, and those that are left on disk.
SAVES = {
    "short": ([], 1, None, [], []),
    "by time": ([], 3, None, [4, 8, 9], [9]),
    "by another time": (["trainer.save_minutes=6"], 3, None, [2, 4, 6, 8, 9], [9]),
    "stopped": ([], 0, 5, [5], [5]),
    "stopped in the last step": ([], 0, 9, [], []),
    "stopped after saving": ([], 3, 6, [4, 6], [6]),
    "by steps": (["trainer.save_freq=4"], 0, None, [4, 8, 9], [4, 8, 9]),
    "by steps and time": (["trainer.save_freq=4"], 4, None, [3, 4, 7, 8, 9], [4, 8, 9]),
    "the newest": (["trainer.max_ckpt_to_keep=2"], 3, None, [4, 8, 9], [8, 9]),
    "never": (["trainer.save_minutes=-1"], 30, 5, [], []),
    "only steps": (["trainer.save_minutes=-1", "trainer.save_freq=2"], 30, 5, [2, 4, 5], [2, 4, 5]),
}


@pytest.mark.parametrize("case", SAVES)
def test_when_a_run_saves_and_what_it_leaves(timed, case):
    overrides, minutes, stopped, steps, left = SAVES[case]
    on_step = lambda step: signal.raise_signal(signal.SIGINT) if step == stopped else None  # noqa: E731  one line of a table of cases
    trainer = timed("trainer.total_training_steps=9", *overrides, minutes=minutes, on_step=on_step)
    assert run(trainer) == sorted(f"step_{step}" for step in left)
    assert trainer.saved == steps and trainer.step == (stopped or 9)


@pytest.mark.parametrize(("freq", "left"), [(-1, ["step_9"]), (4, ["step_4", "step_8", "step_9"])])
def test_a_resumed_run_replaces_only_what_was_saved_by_time(timed, freq, left):
    trainer = timed("trainer.total_training_steps=9", f"trainer.save_freq={freq}", minutes=0)
    run_dir = interrupted_run(trainer.config, 4)
    assert run(trainer, open_checkpoint(run_dir / "checkpoints" / "step_4")) == left


def test_a_longer_run_leaves_the_checkpoint_at_its_earlier_end(timed):
    """Step 5 is no multiple of save_freq, but was the last step, which save_freq saves, too."""
    trainer = timed("trainer.total_training_steps=9", "trainer.save_freq=4")
    run_dir = interrupted_run(with_keys(trainer.config, {"trainer.total_training_steps": 5}), 5)
    start = open_checkpoint(run_dir / "checkpoints" / "step_5")
    assert run(trainer, start) == ["step_5", "step_8", "step_9"]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_answered_with_the_step_that_ends(timed, capfd, number):
    def press(step: int) -> None:
        if step == 6:
            signal.raise_signal(number)
            assert (
                "\nstopping after step 6; press Ctrl-C again to stop now\n"
                in capfd.readouterr().err
            )

    trainer = timed("trainer.total_training_steps=9", on_step=press)
    run(trainer)
    assert trainer.saved == [6]


def test_a_closed_terminal_ends_the_run_after_its_step_though_it_sends_the_signal_twice(
    timed, capfd, monkeypatch
):
    def close(step: int) -> None:
        if step == 6:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(hangup._HangUp, "came", False)
    trainer = timed("trainer.total_training_steps=9", on_step=close)
    assert run(trainer) == ["step_6"] and trainer.saved == [6]
    printed = capfd.readouterr().err
    assert printed.count("the terminal was closed (SIGHUP): stopping after step 6\n") == 1


def test_a_run_under_nohup_does_not_notice_that_the_terminal_is_closed(timed):
    trainer = timed(
        "trainer.total_training_steps=9", on_step=lambda step: signal.raise_signal(signal.SIGHUP)
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(trainer)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trainer.step == 9


def test_a_signal_that_comes_after_the_step_still_saves_it(timed, monkeypatch, capfd):
    log = Tracker.log

    def late(self: Tracker, metrics: Any, step: int) -> None:
        log(self, metrics, step)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Tracker, "log", late)
    trainer = timed("trainer.total_training_steps=9")
    assert run(trainer) == ["step_3"] and trainer.step == 3
    assert "stopping after step 3;" in capfd.readouterr().err


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("moment", ["publish", "evaluate", "train_step"])
def test_without_a_step_to_finish_or_at_the_second_signal_the_run_stops_at_once(
    timed, monkeypatch, moment, number
):
    trainer = timed("trainer.total_training_steps=9")
    done = []

    def press(*arguments: Any) -> Any:
        for _ in range(2 if moment == "train_step" else 1):
            signal.raise_signal(number)
        done.append(moment)

    monkeypatch.setattr(trainer, moment, press)
    before = [signal.getsignal(each) for each in BOTH]
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        run_and_keep(trainer, Checkpoints(trainer), stop, 0.0)
    assert not done and not trainer.exports and not trainer.saved
    if moment != "publish":
        summary = json.loads((trainer.config.run_dir / "summary.json").read_text())
        assert summary["interrupted"] and not summary["finished"]
    assert [signal.getsignal(each) for each in BOTH] == before


def test_a_signal_while_the_last_files_are_written_lets_them_end(timed, monkeypatch, capfd):
    trainer = timed("trainer.total_training_steps=2")

    def save(folder: Path, tokenizer: Any) -> Path:
        signal.raise_signal(signal.SIGINT)
        return trainer.save(folder, tokenizer)

    monkeypatch.setattr(trainer.policy, "save", save)
    with Stop() as stop:
        summary = run_and_keep(trainer, Checkpoints(trainer), stop, 0.0)
    assert summary["finished"] and trainer.exports == 1
    assert "last files are being written; press Ctrl-C again" in capfd.readouterr().err


STARTS = {
    "new": ([], False, [], "fresh, because there is no run in {}"),
    "without checkpoint": ([], None, [], "fresh, because the run in {} has no checkpoint"),
    "finished": ([4], True, [], "fresh, because the run in {} is finished"),
    "disabled": (
        [4],
        None,
        ["trainer.resume_mode=disable"],
        "fresh, because trainer.resume_mode=disable",
    ),
    "resumed": ([2, 4], None, [], "resumes from {}/checkpoints/step_4, after step 4 of 120"),
}
WHEN = {
    "checkpoints: every 10 minutes, at Ctrl-C\n": [],
    "checkpoints: every 5 steps, every 1.5 minutes, at Ctrl-C\n": [
        "trainer.save_freq=5",
        "trainer.save_minutes=1.5",
    ],
    "checkpoints: never, so this run cannot resume (trainer.save_freq=N)\n": [
        "trainer.save_minutes=-1"
    ],
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("case", STARTS)
def test_a_start_says_in_one_line_what_it_resumes_and_when_it_saves(tmp_path, capsys, case, when):
    steps, finished, overrides, words = STARTS[case]
    settings = config(tmp_path, *overrides, *WHEN[when])
    if finished is not False:
        interrupted_run(settings, *steps, finished=bool(finished))
    with open_run(settings):
        pass
    (line,) = [
        line
        for line in capsys.readouterr().err.splitlines(keepends=True)
        if line.startswith("start: ")
    ]
    assert line == f"start: {words.format(settings.run_dir)}; {when}"
