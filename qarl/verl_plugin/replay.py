"""verl's replay buffer, polled more often.

The trainer sleeps between looks at the rollout's progress, two seconds in verl 0.9.1, and no key sets that: a step of
a small model was mostly sleep. `trainer.v1.sampler.custom_sampler` names a class, and this one has another default.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.05


class PromptReplayBuffer(ReplayBuffer):
    """For `trainer.v1.trainer_mode=sync`. verl gives a class of one's own no group filter: `algorithm.filter_groups`
    has no effect with it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"poll_interval": POLL_SECONDS, **kwargs})
