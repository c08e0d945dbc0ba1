"""What a function in a worker process is for, and how messages name it: a reward, or an environment.

Both run in the same processes (`qarl.data.reward_workers`), which know a role by its name.
"""

from __future__ import annotations

from typing import NamedTuple


class Role(NamedTuple):
    """noun: the function in messages. key: of the config, that names it. limit: the key of its time limit.

    unanswered  why a call that took too long cannot be used
    every       how to mend a call without a result
    """

    noun: str
    key: str
    limit: str
    unanswered: str
    every: str


EVERY_RESPONSE = "make it return a score for every response, even an empty or garbled one"
REWARD = Role(
    "the reward function",
    "reward.function",
    "reward.timeout_s",
    "a response without a score cannot be used, and a score of 0 would be wrong",
    EVERY_RESPONSE,
)
ONE_OF_REWARDS = REWARD._replace(key="reward.functions")
ENVIRONMENT = Role(
    "the environment",
    "rollout.environment",
    "multi_turn.timeout_s",
    "the model is told so instead of an answer",
    "make it return a reply to every turn, even an empty or garbled one",
)
ROLES = {role.key: role for role in (REWARD, ONE_OF_REWARDS, ENVIRONMENT)}
