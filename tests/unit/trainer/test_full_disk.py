"""A disk that refuses at any write of a run: the first error is the one reported, and summary and export are tried."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import config
from idle_trainer import Checkpoints, Trainer

from qarl.checkpoint.storage import StorageError
from qarl.errors import UserError
from qarl.metrics import tracker as tracking
from qarl.trainer import finish
from qarl.trainer.loop import run_and_keep
from qarl.trainer.stop import Stop

pytestmark = pytest.mark.usefixtures("in_the_checkout", "no_probe")


# Name of the write -> what to patch, the loggers, whether the run is finished all the same.
SITES: dict[str, tuple[Any, str, list[str], bool]] = {
    "metrics, a line": (tracking, "append_lines", [], False),
    "summary": (finish, "write_json", [], False),
    "plots": (finish, "plot_run", [], True),
    "tensorboard": (tracking._TensorBoard, "log", ["tensorboard"], True),
    "tensorboard, at the end": (tracking._TensorBoard, "close", ["tensorboard"], True),
    "console": (tracking._Console, "log", ["console"], True),
    "console, a message": (tracking._Console, "message", ["console"], True),
}


@pytest.mark.parametrize("first", [False, True], ids=["alone", "after an error"])
@pytest.mark.parametrize("site", SITES)
def test_every_write_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, first: bool
) -> None:
    owner, name, loggers, finished = SITES[site]
    overrides = ["trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.plots=true"]
    overrides += [
        "trainer.val_before_train=false"
    ]  # so that the first line of metrics is of a step
    settings = config(tmp_path, *overrides, f"trainer.logger={loggers}")

    def refuse(*arguments: Any, **keys: Any) -> None:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if site == "plots" or loggers:
            raise error
        raise StorageError("refused", why=error.strerror) from error

    monkeypatch.setattr(owner, name, refuse)

    def fail(step: int) -> None:
        if first and step == 3:
            raise UserError("the first error")

    trainer, reported = (
        Trainer(settings, on_step=fail),
        "the first error" if first and "line" not in site else "",
    )
    with pytest.raises(UserError, match=reported or None) as caught:
        run_and_keep(trainer, Checkpoints(), Stop(), 0.0)
    assert first or "No space left" in str(caught.value)
    assert trainer.exports == 1
    if site != "summary":
        summary = json.loads((settings.run_dir / "summary.json").read_text())
        assert summary["finished"] is (finished and not first)
        assert summary["failed"].startswith(f"UserError: {reported}" if reported else "")
