"""A publish that fails during training: what the trainer holds stays as it was, and training continues afterwards."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from cpu_features import needs_w4a16_cpu
from engine_helpers import config

from qarl.errors import UserError
from qarl.rollout.engine import EngineFailed
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import prepare_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]

OVERRIDES = (
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=16",
    "trainer.val_before_train=false",
    "trainer.logger=[]",
)


def state_digest(trainer: LocalTrainer) -> str:
    sha = hashlib.sha256()
    state = trainer.optimizer.state_dict()
    moments = (
        v for slot in state["inner"]["state"].values() for v in slot.values() if torch.is_tensor(v)
    )
    for tensor in itertools.chain(
        trainer.policy.model.state_dict().values(), state["masters"].values(), moments
    ):
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def fail_to_write(trainer: LocalTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next publish fails half way, and those after it do not."""
    assert trainer.engine.weights is not None
    plan, write = trainer.engine.weights.plan, trainer.engine.weights.plan.write

    def fail(tensors, prepared):
        if any("layers.1" in name for name in tensors):
            monkeypatch.undo()
            raise MemoryError("no memory for the tiles")
        write(tensors, prepared)

    monkeypatch.setattr(plan, "write", fail)


def test_training_survives_a_failed_publish_and_a_lost_engine(tmp_path, monkeypatch):
    run = config(tmp_path, *OVERRIDES, "trainer.total_training_steps=4")
    trainer = LocalTrainer(run, prepare_run(run))
    with trainer.engine:
        trainer.publish()
        metrics = trainer.train_step()
        parts = ("quantize", "pack", "prepare", "validate", "apply")
        assert all(metrics[f"publish/{part}_s"] > 0 for part in parts)
        assert metrics["publish/mbytes"] > 0 and metrics["publish/rebuilds"] == 0

        before = state_digest(trainer)
        fail_to_write(trainer, monkeypatch)
        with pytest.raises(MemoryError, match="tiles"):
            trainer.publish()
        with pytest.raises(UserError, match="refuses to generate"):
            trainer.train_step()
        assert state_digest(trainer) == before
        trainer.publish()
        assert math.isfinite(trainer.train_step()["mismatch/k3"])
        assert state_digest(trainer) != before

        before = state_digest(trainer)
        trainer.engine.llm.llm_engine.engine_core.shutdown()
        with pytest.raises(EngineFailed, match="is lost"):
            trainer.train_step()
        assert state_digest(trainer) == before and trainer.engine.rebuilds == 0


def test_with_rebuild_on_failure_the_run_goes_on(tmp_path, capfd):
    exact = ("quant.align=exact", "rollout.rebuild_on_failure=true")  # exact: δ is 0 on every CPU
    run = config(tmp_path, *OVERRIDES, "trainer.total_training_steps=4", *exact)
    trainer = LocalTrainer(run, prepare_run(run))
    with trainer.engine:
        trainer.publish()
        first = trainer.train_step()
        assert first["publish/rebuilds"] == 0
        trainer.engine.llm.llm_engine.engine_core.shutdown()
        second = trainer.train_step()
        assert second["publish/rebuilds"] == 1
        assert "is restarted" in capfd.readouterr().err
        assert second["mismatch/abs_max"] == 0, "the new engine has the trainer's weights"
