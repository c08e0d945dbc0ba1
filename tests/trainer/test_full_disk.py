"""A disk that refuses at any write of a run: the first error is the one reported, and summary and export are tried.

Every place that a run writes to is a row of `SITES`; the refusals are real (a file size limit, /dev/full) if the
operating system can be made to refuse just there, and injected if it cannot.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import config
from idle_trainer import Checkpoints, Trainer

from qarl.checkpoint.storage import StorageError
from qarl.errors import UserError
from qarl.metrics import tracker as tracking
from qarl.trainer import finish
from qarl.trainer.loop import Stop, run_and_keep

pytestmark = pytest.mark.usefixtures("in_the_checkout", "no_probe", "git_takes_no_lock")


class Saving(Trainer):
    """The stub trainer with an export that works and is counted; `on_step` runs in every step."""

    def __init__(self, settings: Any, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(settings)
        self.on_step, self.saved = on_step, 0

    def train_step(self) -> dict[str, float]:
        self.on_step(self.step)
        return super().train_step() | {"timing_s/step": 1.0}

    def evaluate(self) -> dict[str, float]:
        return {"val/accuracy": 0.5}

    def save(self, folder: Path, tokenizer: Any) -> Path:
        self.saved += 1
        return folder


def full(*arguments: Any, **keys: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run(trainer: Trainer) -> None:
    run_and_keep(trainer, Checkpoints(), Stop(), 0.0)


def summary_of(settings: Any) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((settings.run_dir / "summary.json").read_text())
    return summary


# Name of the write -> what to patch, the loggers, whether the run is finished all the same.
SITES: dict[str, tuple[list[tuple[Any, str]], list[str], bool]] = {
    "metrics, a line": ([(tracking, "append_lines")], [], False),
    "summary": ([(finish, "write_json")], [], False),
    "plots": ([(finish, "plot_run")], [], True),
    "tensorboard": ([(tracking._TensorBoard, "log")], ["tensorboard"], True),
    "tensorboard, at the end": ([(tracking._TensorBoard, "close")], ["tensorboard"], True),
    "console": ([(tracking._Console, "log")], ["console"], True),
    "console, a message": ([(tracking._Console, "message")], ["console"], True),
}


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after an error"])
@pytest.mark.parametrize("site", SITES)
def test_every_write_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, first: bool) -> None:
    patches, loggers, finished = SITES[site]
    overrides = ["trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.plots=true"]
    settings = config(tmp_path, *overrides, f"trainer.logger={loggers}")

    def refuse(*arguments: Any, **keys: Any) -> Any:
        try:
            full()
        except OSError as error:
            raise StorageError("refused", why=error.strerror) from error

    raw = site in ("plots",) or bool(loggers)  # these raise the system's own error
    for owner, name in patches:
        monkeypatch.setattr(owner, name, full if raw else refuse)

    def fail(step: int) -> None:
        if first and step == 2:
            raise UserError("the first error")

    trainer = Saving(settings, fail)
    with pytest.raises(UserError, match="the first error" if first and "line" not in site else None) as caught:
        run(trainer)
    assert first or "No space left" in str(caught.value)
    assert trainer.saved == 1
    if site != "summary":
        summary = summary_of(settings)
        assert summary["finished"] is (finished and not first)
        assert summary["failed"].startswith("UserError: the first error" if first and "line" not in site else "")
