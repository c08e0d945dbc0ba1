"""A step that a checkpoint holds has its row in metrics.jsonl, wherever the run ends: verl's own loop without its work,
and the follower of its log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl_runs import quickstart

from qarl.metrics.tracker import read_metrics
from qarl.verl.config import trainer_keys
from qarl.verl.followed_log import MetricsFollower
from qarl.verl.saving import UNFINISHED

pytest.importorskip("verl")

pytestmark = pytest.mark.usefixtures("own_environment")
STEPS, FREQ, SECONDS = 5, 2, 0.02


class Loop:
    """`PPOTrainer.fit` of verl, with parts that only call `at` with their name and the step.

    `saved`: the last step that was saved. `counted`: the steps whose metrics were computed."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        from verl.trainer.ppo.v1 import trainer_base

        changes = {
            "output_dir": str(folder),
            "trainer.logger": [],
            "trainer.report": False,
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": FREQ,
            "trainer.test_freq": FREQ,
            "trainer.val_before_train": False,
        }
        self.config = quickstart(**changes)
        self.folder = self.config.run_dir
        self.folder.mkdir()
        (self.folder / "verl.yaml").touch()
        self.log = self.folder / "verl.jsonl"
        patch.setenv("VERL_FILE_LOGGER_PATH", str(self.log))
        self.at: Callable[[str, int], object] = lambda part, step: None
        self.saved, self.counted = 0, list[int]()

        def step(trainer: Any, metrics: dict[str, Any], timing: dict[str, float]) -> Any:
            time.sleep(SECONDS)
            metrics["actor/mismatch/k3"] = 0.0
            return SimpleNamespace(keys=[], tags=[], partition_id="train")

        def save(trainer: Any) -> None:
            self.at("saving", trainer.global_steps)
            self.saved = trainer.global_steps

        def validate(trainer: Any) -> dict[str, float]:
            self.at("validating", trainer.global_steps)
            return {"val/accuracy": 0.5}

        def compute(
            trainer: Any, batch: Any, metrics: Any, timing: Any, step: int, epoch: int
        ) -> None:
            assert (step, epoch) == (trainer.global_steps, 0)
            self.at("computing", trainer.global_steps)
            self.counted.append(trainer.global_steps)
            metrics["critic/score/mean"] = float(trainer.global_steps)
            metrics |= {f"timing_s/{name}": value for name, value in timing.items()}
            metrics["perf/throughput"] = 1 / timing["step"]  # verl needs it

        base = trainer_base.PPOTrainer
        patch.setattr(base, "step", step)
        patch.setattr(base, "_save_checkpoint", save)
        patch.setattr(base, "_validate", validate)
        patch.setattr(base, "_compute_metrics", compute)
        patch.setattr(trainer_base, "tq", SimpleNamespace(kv_clear=lambda **more: None))

    def trainer(self) -> Any:
        from qarl.verl.trainer import QaRLTrainerSync

        trainer: Any = object.__new__(QaRLTrainerSync)
        trainer.config = OmegaConf.create(
            {
                "skip": {},
                "global_profiler": {"steps": None},
                "actor_rollout_ref": {"actor": {"fsdp_config": {}}},
                "trainer": {},
            }
        )
        for key, value in trainer_keys(self.config).items():
            OmegaConf.update(trainer.config, key.removeprefix("+"), value, force_add=True)
        trainer.global_steps, trainer.total_training_steps = self.saved, STEPS
        trainer.steps_per_epoch = 100
        trainer._rollout_moe_lb_metrics_accumulator = SimpleNamespace()
        publish = SimpleNamespace(update_weights=lambda step: self.at("publishing", step))
        trainer.checkpoint_manager = publish
        for name in ("_start_profiling", "_stop_profiling", "_reissue_inflight_prompts"):
            setattr(trainer, name, lambda: None)
        trainer._shutdown_dump_executor = lambda: None
        return trainer

    def fit(self) -> None:
        self.trainer().fit(None)

    def follow(self) -> None:
        """Run as `qarl train` does."""
        with MetricsFollower(self.config, self.log, 0.0, start_step=self.saved):
            self.fit()

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of which each step has one."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = read_metrics(self.folder)
        assert len(lines) == len(rows), lines
        return rows


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(tmp_path, monkeypatch)


class Killed(BaseException):
    """In the place of SIGKILL: nothing that is to follow is done."""


def fail(part: str, step: int, error: BaseException) -> Callable[[str, int], None]:
    def at(now: str, of: int) -> None:
        if (now, of) == (part, step):
            raise error

    return at


@pytest.mark.parametrize("part", ["publishing", "validating"])
@pytest.mark.parametrize("error", [RuntimeError("no engine"), KeyboardInterrupt(), Killed()])
def test_a_saved_step_has_its_row(loop: Loop, part: str, error: BaseException) -> None:
    loop.at = fail(part, 4, error)
    with pytest.raises(type(error)):
        loop.fit() if isinstance(error, Killed) else loop.follow()
    assert loop.saved == 4
    if not isinstance(error, Killed):  # before any resume
        assert [row["step"] for row in loop.rows()] == [1, 2, 3, 4]
    loop.at = lambda part, step: None
    loop.follow()
    rows = loop.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["critic/score/mean"] == row["step"] and row["mismatch/k3"] == 0.0
        assert row["timing_s/step"] >= SECONDS and row["perf/throughput"] > 0
        assert UNFINISHED not in row
    published = ["timing_s/publish" in row for row in rows]
    assert published == [True, True, True, False, True]
    assert ["val/accuracy" in row for row in rows] == [False, True, False, False, True]


def test_a_step_that_ends_has_verls_own_row(loop: Loop) -> None:
    loop.follow()
    rows = loop.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all("timing_s/publish" in row for row in rows)
    assert ["timing_s/save_checkpoint" in row for row in rows] == [False, True, False, True, True]
    marked = [
        entry["step"]
        for entry in map(json.loads, loop.log.read_text().splitlines())
        if UNFINISHED in entry["data"]
    ]
    assert marked == [2, 4, 5]  # it costs nothing in the others
    assert loop.counted == [1, 2, 2, 3, 4, 4, 5, 5]


def test_steps_that_the_killed_command_had_not_read_are_logged(loop: Loop) -> None:
    """They are in verl's log only, and verl's next process empties it."""
    loop.at = fail("computing", 5, Killed())
    with pytest.raises(Killed):
        loop.fit()
    loop.at = lambda part, step: None
    loop.follow()
    assert [row["step"] for row in loop.rows()] == [1, 2, 3, 4, 5]
    assert all("timing_s/publish" in row for row in loop.rows())


def test_a_step_whose_checkpoint_breaks_off_is_made_again(loop: Loop) -> None:
    loop.at = fail("saving", 4, Killed())
    with pytest.raises(Killed):
        loop.fit()
    assert loop.saved == 2
    loop.at = lambda part, step: None
    loop.follow()
    assert [row["step"] for row in loop.rows()] == [1, 2, 3, 4, 5]
    assert all("timing_s/publish" in row for row in loop.rows())


def test_metrics_that_cannot_be_computed_cost_no_checkpoint(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.at = fail("computing", 2, ValueError("no such column"))
    with pytest.raises(ValueError, match="no such column"):
        loop.follow()
    assert loop.saved == 2
    assert "step 2: its metrics were not written" in caplog.text
