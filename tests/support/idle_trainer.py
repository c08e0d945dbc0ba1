"""A trainer whose steps only count, for tests of everything around the steps; no engine."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qarl.checkpoint.storage import StorageError
from qarl.metrics.mismatch import PhaseTimer
from qarl.metrics.tracker import Tracker
from qarl.rollout.publish.wire import PublishReport


class Trainer:
    """A trainer whose steps only count; Ctrl-C comes during the evaluation of step 2 if `interrupted` is set."""

    def __init__(self, settings: Any, *, published: int = 1000) -> None:
        self.config, self.step = settings, 0
        self.interrupted = False
        self.warnings = ["the mismatch is over its limit"]
        self.timer, self.published = PhaseTimer(None), published
        self.parts = SimpleNamespace(val_prompts=[1])
        self.policy = SimpleNamespace(report="", align="off", save=self.save)
        self.tokenizer = None

    def publish(self) -> PublishReport:
        return PublishReport(0, 1, self.published, 0, 0, {})

    def train_step(self) -> dict[str, float]:
        self.step += 1
        return {"actor/skipped_steps": 0}

    def evaluate(self) -> dict[str, float]:
        if self.step == 2 and self.interrupted:
            signal.raise_signal(signal.SIGINT)
        return {"val/accuracy": 0.5}

    def save(self, folder: Path, tokenizer: Any) -> Path:
        raise StorageError(f"{folder} could not be written", why="File too large", fix="free some space")


class Checkpoints:
    def __init__(self) -> None:
        self.after: list[bool] = []

    def resumed(self, tracker: Tracker) -> None:
        pass

    def after_step(self, metrics: dict[str, float], tracker: Tracker, *, stopped: bool) -> dict[str, float]:
        self.after.append(stopped)
        return {}

    def stopped(self, tracker: Tracker) -> None:
        pass
