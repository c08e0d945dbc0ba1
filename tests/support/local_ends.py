"""A local run whose engine and update are stand-ins, for tests of how it ends. The policy, the rewards, the checkpoints
and the export are real."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ends import BOOM

from qarl.rollout.engine import EngineFailed, RolloutEngine
from qarl.rollout.publish.manifest import PublishReport
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.local import LocalTrainer

RUN = Path("runs/bad")


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
        engine: Any = self.engine
        engine.weight_version = self.step
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


def close_the_terminal(*arguments: Any) -> None:
    """It often sends SIGHUP twice."""
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)


def interrupt_twice(*arguments: Any) -> None:
    interrupt()
    interrupt()


def summary() -> dict[str, Any]:
    """Return the summary of the run."""
    content: dict[str, Any] = json.loads((RUN / "summary.json").read_text())
    return content


def put(name: str, kind: str) -> Path:
    """Put a file, or a folder with a file, of the user into the run folder. Return the file."""
    path = RUN / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    file = path / "thesis.tex" if kind == "folder" else path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    return file
