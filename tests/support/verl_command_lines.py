"""verl's own command line with a group of QaRL's: its config, and what QaRL says of it before Ray starts."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl_runs import NAMED

from qarl.errors import UserError
from qarl.verl.checks import composed_errors

ROLLOUT = "actor_rollout_ref.rollout"
FIXED = (
    "hydra.searchpath=[pkg://qarl.verl]",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    *NAMED,
)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*FIXED, *overrides])


def told(*overrides: str) -> list[UserError]:
    return composed_errors(composed("+qarl=w4a16", *overrides))


def keys_of(errors: list[UserError]) -> list[str]:
    return [(error.where or "").removeprefix("+") for error in errors]
