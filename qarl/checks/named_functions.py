"""Load the functions of a user that a config names, and end their processes: for a dry run, which calls none of them.

A run loads the same ones by the same code before it starts, and then calls each once (`qarl.checks.registry`).
"""

from __future__ import annotations

from collections.abc import Iterator

from qarl.config import Config
from qarl.data.environments import Environment
from qarl.data.reward_workers import Reward
from qarl.data.scoring import reward_of
from qarl.data.weighted_reward import WeightedReward
from qarl.errors import UserError


def load_errors(config: Config) -> Iterator[UserError]:
    """Yield the error of each function of `reward` and of `rollout.environment` that cannot be loaded.

    Built-in functions are left out, whose packages may be only on the machine of the run."""
    reward = reward_of(config.reward)
    parts = (
        [part.reward for part in reward.parts] if isinstance(reward, WeightedReward) else [reward]
    )
    named = [
        part for part, name in zip(parts, config.reward.names, strict=True) if is_of_user(name)
    ]
    functions: list[Reward | Environment] = [*named, *_environments(config)]
    for function in functions:
        try:
            function.load()
        except UserError as error:
            yield error
        finally:
            function.stop()


def is_of_user(name: str) -> bool:
    """Return whether a key names a function of the user: `module:function` or `file.py:function`."""
    return ":" in name


def _environments(config: Config) -> Iterator[Environment]:
    if config.rollout.environment is not None:
        yield Environment(config.rollout.environment, workers=1, timeout_s=None)
