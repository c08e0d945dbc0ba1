"""The part of a local trainer that updates and is saved, without an engine, and a batch of four responses for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from qarl.checkpoint.resumable import open_checkpoint
from qarl.config import Config
from qarl.data.prompts import PromptSampler
from qarl.metrics.phase_timer import PhaseTimer
from qarl.objectives.settings import objective_settings
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.checkpoints import Checkpoints, restore
from qarl.trainer.local import LocalTrainer
from qarl.trainer.policy import Policy

FOUR = (
    "data.train_batch_size=2", "rollout.n=2", "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.log_prob_micro_batch_size_per_gpu=4",
)  # fmt: skip
"""Config keys for which `four_responses` are a batch."""


def updating_trainer(settings: Config, policy: Policy | None = None) -> Any:
    """A trainer of `policy`, by default of the one that `settings` describe."""
    trainer = object.__new__(LocalTrainer)
    trainer.config, trainer.objective, trainer.timer = (
        settings,
        objective_settings(settings),
        PhaseTimer(),
    )
    trainer.replace_policy(policy or Policy.load(settings))
    return trainer


def through_checkpoint(trainer: Any, other: Any) -> Any:
    """`other`, restored from a checkpoint of `trainer`, which is on disk afterwards."""
    for instance in (trainer, other):
        instance.parts = SimpleNamespace(train_prompts=[], sampler=PromptSampler(4, 2), record={})
    trainer.engine = SimpleNamespace(weight_version=trainer.step)
    trainer.tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    checkpoints, no_tracker = Checkpoints(trainer), SimpleNamespace()
    checkpoints.save({}, no_tracker)  # type: ignore[arg-type]  # it has nothing to say
    restore(other, open_checkpoint(checkpoints.folder / f"step_{trainer.step}"))
    return other


def four_responses(advantages: tuple[float, ...] = (1.0, -1.0, 1.0, -1.0)) -> Batch:
    """Two prompts with two responses each."""
    tokens = [[7, 8, 9], [10, 11], [12], [13, 14]]
    rollout = RolloutBatch(
        [[5, 6]] * 4, tokens, [[-4.0] * len(row) for row in tokens], ["stop"] * 4, weight_version=0
    )
    return make_batch(rollout, torch.zeros(4), torch.tensor(advantages), pad_token_id=0)
