"""trainer.save_best: which checkpoint is kept, beside every other rule about checkpoints, and after a resume."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoint_state import write_bare
from engine_helpers import config
from idle_trainer import Trainer

from qarl.checkpoint.resumable import open_checkpoint
from qarl.checkpoint.storage import StorageError
from qarl.config import ConfigError, load_config
from qarl.metrics.tracker import Tracker
from qarl.trainer import checkpoints as checkpointing
from qarl.trainer.best_checkpoint import Best, rewrite
from qarl.trainer.checkpoints import Checkpoints
from qarl.trainer.loop import run_steps
from qarl.trainer.stop import Stop

pytestmark = pytest.mark.usefixtures("in_the_checkout", "no_probe")
QUIET = [
    "trainer.logger=[]",
    "trainer.plots=false",
    "trainer.report=false",
    "trainer.test_freq=1",
    "trainer.save_minutes=-1",
    "trainer.total_training_steps=6",
]
ON = "trainer.save_best=true"
NAN = math.nan


class Scored(Trainer):
    """Evaluations have these figures, the first that before step 1."""

    figures: tuple[float, ...] = ()

    def evaluate(self) -> dict[str, float]:
        return {"val/accuracy": self.figures[self.step]}


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(figures: tuple[float, ...], *keys: str, full: int = 0) -> Any:
        trainer: Any = Scored(
            config(tmp_path, *QUIET, *keys, *([] if "trainer.save_best=false" in keys else [ON]))
        )
        trainer.figures = figures

        def save(folder: Path, *, state: dict[str, Any], **parts: Any) -> int:
            if trainer.step == full:
                raise StorageError("the disk is full", why="no space", fix="free some")
            shutil.rmtree(folder, ignore_errors=True)
            write_bare(
                folder, step=trainer.step, config=trainer.config.model_dump(mode="json"), **state
            )
            return 0

        monkeypatch.setattr(checkpointing, "save_checkpoint", save)
        monkeypatch.setattr(checkpointing, "forward_weights", lambda policy: [])
        monkeypatch.setattr(
            checkpointing,
            "training_state",
            lambda trainer, metrics, best: {"best": asdict(best)} if best else {},
        )
        monkeypatch.setattr(
            checkpointing, "restore", lambda trainer, saved: setattr(trainer, "step", saved.step)
        )
        return trainer

    return make


def run(trainer: Any, start: Any = None) -> list[int]:
    with Tracker(trainer.config.run_dir, [], 9, {}) as tracker, Stop() as stop:
        run_steps(trainer, Checkpoints(trainer, start), tracker, stop, 0.0)
    folder = trainer.config.run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name.removeprefix("step_")) for name in names)


def noted(trainer: Any) -> Any:
    path = trainer.config.run_dir / "best.json"
    return json.loads(path.read_text()) if path.is_file() else None


# Figures before step 1 and after each of six, keys, the steps that are left on disk, and the best one.
CASES = {
    "rising": ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), [], [6], 6),
    "falling": ((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3), [], [1], 1),
    "a hill": ((0.0, 0.1, 0.4, 0.9, 0.4, 0.4, 0.5), [], [3], 3),
    "the first of equal ones": ((0.0, 0.5, 0.9, 0.9, 0.9, 0.1, 0.9), [], [2], 2),
    "not a number": ((0.0, NAN, 0.5, NAN, 0.4, NAN, NAN), [], [2], 2),
    "never a number": ((NAN,) * 7, [], [], None),
    "beside save_freq": (
        (0.0, 0.1, 0.4, 0.9, 0.4, 0.4, 0.5),
        ["trainer.save_freq=2"],
        [2, 3, 4, 6],
        3,
    ),
    "a former best that save_freq keeps": (
        (0.0, 0.1, 0.4, 0.9, 0.4, 0.4, 0.5),
        ["trainer.save_freq=1"],
        [1, 2, 3, 4, 5, 6],
        3,
    ),
    "beside the newest": (
        (0.0, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1),
        ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2"],
        [1, 5, 6],
        1,
    ),
    "among the newest": (
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.1),
        ["trainer.save_freq=1", "trainer.max_ckpt_to_keep=2"],
        [5, 6],
        5,
    ),
    "off": (
        (0.0, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1),
        ["trainer.save_best=false", "trainer.save_freq=3"],
        [3, 6],
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left(scored: Callable[..., Any], name: str) -> None:
    figures, keys, left, best = CASES[name]
    trainer = scored(figures, *keys)
    assert run(trainer) == left
    assert noted(trainer) == (
        best and {"step": best, "accuracy": figures[best], "checkpoint": f"checkpoints/step_{best}"}
    )


def test_a_resume_knows_the_best_of_before(scored: Callable[..., Any]) -> None:
    """Step 2 was the best when step 4 was saved. A worse evaluation does not replace it, a better one does."""
    for later, left in ((0.4, [2, 4, 6]), (0.95, [4, 5, 6])):
        trainer = scored(
            (0.0, 0.1, 0.9, 0.2, 0.3, later, 0.1), f"name=n{later}", "trainer.save_freq=4"
        )
        folder = trainer.config.run_dir / "checkpoints"
        for step in (2, 4):
            write_bare(
                folder / f"step_{step}",
                step=step,
                config=trainer.config.model_dump(mode="json"),
                best={"step": 2, "accuracy": 0.9},
            )
        assert run(trainer, open_checkpoint(folder / "step_4")) == left


@pytest.mark.parametrize(("last", "best"), [(0.95, 6), (0.2, 2)])
def test_an_evaluation_that_a_resume_repeats_may_be_the_best(
    scored: Callable[..., Any], last: float, best: int
) -> None:
    """The run ended in the evaluation after its last step, whose checkpoint had been written."""
    trainer = scored((0.0, 0.1, 0.9, 0.2, 0.3, 0.4, last))
    folder = trainer.config.run_dir / "checkpoints"
    for step in (2, 6):
        write_bare(
            folder / f"step_{step}",
            step=step,
            config=trainer.config.model_dump(mode="json"),
            best={"step": 2, "accuracy": 0.9},
        )
    left = run(trainer, open_checkpoint(folder / "step_6"))
    assert best in left
    assert (noted(trainer) or {"step": 2})["step"] == best
    state = open_checkpoint(folder / f"step_{best}").state
    assert state["best"] == {"step": best, "accuracy": max(last, 0.9)}


def test_a_resume_from_an_earlier_step_rewrites_what_the_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    Best(30, 0.9).write(tmp_path, folder)
    rewrite(Best(10, 0.4), tmp_path, folder)
    written = json.loads((tmp_path / "best.json").read_text())
    assert written == {"step": 10, "accuracy": 0.4, "checkpoint": "checkpoints/step_10"}
    rewrite(None, tmp_path, folder)
    assert not (tmp_path / "best.json").exists()


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write_bare(folder / "step_4", step=4, best={"step": 2, "accuracy": 0.9})
    checkpoint = open_checkpoint(folder / "step_4")
    assert Best.of(checkpoint, folder) is None
    write_bare(folder / "step_2", step=2)
    assert Best.of(checkpoint, folder) == Best(2, 0.9)
    assert Best.of(open_checkpoint(folder / "step_2"), folder) is None


def test_a_full_disk_leaves_the_best_of_before(scored: Callable[..., Any]) -> None:
    trainer = scored((0.0, 0.5, 0.1, 0.9, 0.1, 0.1, 0.1), full=3)
    assert run(trainer) == [1]
    assert noted(trainer)["step"] == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["trainer.test_freq=-1"], r"has no effect with trainer\.test_freq = -1"),
        (["trainer.test_freq=2", "backend=verl"], "has no effect with backend = .verl"),
    ],
)
def test_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["config=quickstart.yaml", "trainer.save_best=true", *keys])
