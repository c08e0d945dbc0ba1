"""A stand-in for verl's `run_ppo`, and errors as Ray hands them on, for tests of how a verl run ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ends import SOURCES
from transformers import AutoModelForCausalLM

from qarl.verl.trainer import QaRLTrainerSync


class RunPPO:
    """verl's `run_ppo` of a run with this `shape`, without its work. `at_step`: what happens in each step, before its
    checkpoint; `after`: after it, before its evaluation."""

    def __init__(
        self,
        shape: str,
        at_step: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        self.shape, self.at_step, self.after = shape, at_step or ignore, after or ignore

    def __call__(self, config: Any, task_runner_class: Any) -> None:
        from verl.utils.tracking import FileLogger

        logger, trainer = FileLogger("qarl", "bad"), config.trainer
        start = int(tracker.read_text()) if (tracker := tracker_of(config)).exists() else 0
        if trainer.val_before_train:
            logger.log(self.evaluation(), start)
        for step in range(start + 1, trainer.total_training_steps + 1):
            last = step == trainer.total_training_steps
            metrics = {
                "timing_s/step": 1.0,
                "actor/mismatch/k3": float("nan"),
                "critic/score/mean": 0.5,
            }
            self.at_step(step)
            if trainer.save_freq > 0 and (last or step % trainer.save_freq == 0):
                save(config, step)
            self.after(step)
            if trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
                metrics |= self.evaluation()
            logger.log(metrics, step)
        logger.finish()

    def evaluation(self) -> dict[str, Any]:
        sources = SOURCES if self.shape == "several sources" else {"test": 2}
        rows = [
            (source, f"{source} {row}") for source, count in sources.items() for row in range(count)
        ]
        rows = [row for row in rows for _ in range(4 if self.shape == "four answers" else 1)]
        rewards = [0.5 if source else 1.0 for source, _ in rows]
        if self.shape == "not a number":
            rewards[0] = float("nan")
        trainer = object.__new__(QaRLTrainerSync)
        return trainer._val_metrics_update(
            [source for source, _ in rows],
            [prompt for _, prompt in rows],
            {"reward": rewards},
            [2] * len(rows),
        )


def ignore(step: int) -> None:
    pass


def tracker_of(config: Any) -> Path:
    return Path(config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"


def save(config: Any, step: int) -> None:
    """Leave a checkpoint as verl's FSDP checkpoint manager and trainer do."""
    folder = tracker_of(config).with_name(f"global_step_{step}")
    (folder / "actor").mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    torch.save(dict(model.state_dict()), folder / "actor" / "model_world_size_1_rank_0.pt")
    shutil.copytree("model", folder / "actor" / "huggingface")
    torch.save({}, folder / "data.pt")
    tracker_of(config).write_text(str(step))


def at(step: int, action: Callable[[], Any]) -> Callable[[int], None]:
    return lambda now: action() if now == step else None


def fail(error: BaseException) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


def of_task(cause: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands an error from a worker."""
    return ray.exceptions.RayTaskError("run", "Traceback: of the task", cause).as_instanceof_cause()


MEMORY = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: 1f) where the task "
    "(actor ID: 2e, name=WorkerDict.__init__, pid=42) was running was 22.9GB / 23.0GB (0.99), which exceeds the memory "
    "usage threshold of 0.95.\nRefer to the documentation on how to address the out of memory issue."
)
DEAD = "a process of the verl run died"
