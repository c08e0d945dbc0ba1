"""A trainer whose steps only count, for tests of everything around the steps; no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qarl.checkpoint.storage import StorageError
from qarl.config.level import Level
from qarl.metrics.phase_timer import PhaseTimer
from qarl.metrics.tracker import Tracker
from qarl.rollout.publish.manifest import PublishReport


class Trainer:
    """`on_step` runs in every step. `exports`: how often it was exported. `full`: an export finds no room."""

    def __init__(
        self,
        settings: Any,
        *,
        published: int = 1000,
        full: bool = False,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.config, self.step, self.exports = settings, 0, 0
        self.warnings = ["the mismatch is over its limit"]
        self.timer, self.published, self.full, self.on_step = (
            PhaseTimer(),
            published,
            full,
            on_step,
        )
        self.parts = SimpleNamespace(val_prompts=[1])
        model = SimpleNamespace(config=None)
        self.policy = SimpleNamespace(
            report="", align=Level.OFF, save=self.save, model=model, adapters=None
        )
        self.optimizer, self.tokenizer = SimpleNamespace(state_dict=dict), None

    def publish(self) -> PublishReport:
        return PublishReport(0, 1, self.published, 0, 0, {})

    def train_step(self) -> dict[str, float]:
        self.step += 1
        self.on_step(self.step)
        return {"actor/skipped_steps": 0, "timing_s/step": 1.0}

    def evaluate(self) -> dict[str, float]:
        return {"val/accuracy": 0.5}

    def save(self, folder: Path, tokenizer: Any) -> Path:
        if self.full:
            raise StorageError(
                f"{folder} could not be written", why="File too large", fix="free some space"
            )
        self.exports += 1
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        return folder


class Checkpoints:
    def __init__(self) -> None:
        self.after: list[bool] = []

    def resumed(self, tracker: Tracker) -> None:
        pass

    def evaluated(self, metrics: dict[str, float], tracker: Tracker) -> dict[str, float]:
        return {}

    def after_step(
        self, metrics: dict[str, float], tracker: Tracker, *, stopped: bool
    ) -> dict[str, float]:
        self.after.append(stopped)
        return {}

    def stopped(self, tracker: Tracker) -> None:
        pass
