"""Keys about responses, rewards and conversations that do not fit together (`qarl.config.checks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qarl.config.errors import Problem, bad
from qarl.config.reward import RewardConfig
from qarl.config.types import TURN_REWARDS

Values = Mapping[str, Any]
Problems = Iterator[Problem]


def responses_can_end(v: Values) -> Problems:
    key = "rollout.min_tokens"
    limit = v["data.max_response_length"]
    if v[key] >= limit:
        reason = f"a response has at most data.max_response_length = {limit} tokens, so none could end by itself"
        yield bad(v, key, reason, f"set it below {limit}")
    elif v[key] and v["backend"] == "verl":
        reason = (
            "the engine leaves the tokens that end a response out of its first tokens, but the log-probs of verl's "
            "trainer are over the whole vocabulary"
        )
        yield bad(v, key, reason, "set it to 0, or set backend=local")


def reward_of(v: Values) -> RewardConfig:
    """Return the reward's keys of functions."""
    return RewardConfig(function=v["reward.function"], functions=v["reward.functions"])


def rewards_have_names(v: Values) -> Problems:
    key = "reward.functions"
    reward = reward_of(v)
    labels = reward.labels
    if twice := [label for label in labels if labels.count(label) > 1]:
        reason = f"two functions are called {twice[0]}, and each needs its own metric"
        yield bad(v, key, reason, "give them different names, as in {function: ..., name: other}")
    if not any(part.weight for part in reward.parts):
        yield bad(v, key, "all weights are 0, so there is nothing to learn", "give one a weight")


def the_punishment_begins_within_the_response(v: Values) -> Problems:
    key = "reward.overlong_buffer_len"
    limit = v["data.max_response_length"]
    if v[key] is not None and v[key] > limit:
        reason = f"a response has at most data.max_response_length = {limit} tokens"
        yield bad(v, key, reason, f"set it to at most {limit}; DAPO takes a fifth")


def conversations_have_an_environment(v: Values) -> Problems:
    key = "rollout.environment"
    longest = "multi_turn.max_turn_length"
    if v[key] is None:
        reward = reward_of(v)
        of_turns = [name for name in reward.names if name in TURN_REWARDS]
        if of_turns:
            reason = (
                f"{of_turns[0]} is the sum of the rewards of rollout.environment, which is not set"
            )
            yield bad(v, reward.key, reason, f"set {key}, or choose another function")
        return
    limit = v["data.max_response_length"]
    if v[longest] is not None and v[longest] > limit:
        reason = f"a whole conversation has data.max_response_length = {limit} tokens"
        yield bad(v, longest, reason, f"set it to at most {limit}, or to null")


CHECKS: tuple[Callable[[Values], Problems], ...] = (
    responses_can_end,
    rewards_have_names,
    the_punishment_begins_within_the_response,
    conversations_have_an_environment,
)
