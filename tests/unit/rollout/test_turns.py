"""Conversations of a rollout without an engine: seeds of turns, what a reward is told, the end of sessions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qarl.data.prompts import Prompt
from qarl.errors import UserError
from qarl.rollout.engine_config import SamplingConfig
from qarl.rollout.requests import RolloutBatch
from qarl.rollout.turns import _Rollout, scored_prompts
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.loop import Request, turn_seed


class LostEngine:
    """An engine whose process is gone: it refuses whatever it is asked."""

    def __init__(self) -> None:
        self.llm = self
        self.llm_engine = self
        self.aborted = 0

    def abort_request(self, names, internal):
        self.aborted += 1
        raise RuntimeError("the engine is dead")


def test_the_first_error_of_a_lost_engine_is_the_one_that_is_raised():
    engine = LostEngine()
    rollout = _Rollout(engine, SamplingConfig(max_tokens=4), None, 1)
    with pytest.raises(UserError, match="the environment returned 3"), rollout.in_sessions():
        raise UserError("the environment returned 3", where="x", fix="y")
    assert engine.aborted == 1


def test_an_engine_that_cannot_end_its_sessions_is_an_error():
    rollout = _Rollout(LostEngine(), SamplingConfig(max_tokens=4), None, 1)
    with pytest.raises(RuntimeError, match="dead"), rollout.in_sessions():
        pass


def test_a_turn_has_the_seed_of_its_own_row():
    """Of three conversations the first has ended, so places among the requests are not rows."""
    asked = []

    def generate(prompts, sampling, seeds, *, max_tokens):
        asked.extend(seeds)
        return SimpleNamespace(
            weight_version=0,
            preemptions=0,
            top_token_ids=None,
            routed_experts=None,
            response_token_ids=[[5]] * len(prompts),
            rollout_log_probs=[[-1.0]] * len(prompts),
            finish_reasons=["stop"] * len(prompts),
        )

    rollout = _Rollout(
        SimpleNamespace(generate=generate), SamplingConfig(max_tokens=4), [11, 22, 33], 3
    )
    rollout.sample([Request(1, 1, [1], 4), Request(2, 1, [1], 4)])
    assert asked == [turn_seed(22, 1), turn_seed(33, 1)]
    assert len({*asked, turn_seed(22, 2), turn_seed(11, 1)}) == 4


def test_what_a_reward_is_told_of_a_conversation():
    """Two turns are four messages of user and model, as verl counts them."""
    conversation = Conversation([1, 2], [{"role": "user", "content": "?"}])
    conversation.add_turn(Sampled([3], [-0.5], "stop"), "a call")
    conversation.add_context([{"role": "tool", "content": "42"}], [5, 6])
    conversation.add_turn(Sampled([8], [-0.25], "stop"), "42")
    conversation.rewards.append(0.5)
    rollout = RolloutBatch(
        [[1, 2]], [[3, 5, 6, 8]], [[0.0] * 4], ["stop"], 0, conversations=[conversation]
    )
    prompt = Prompt(7, "x", [{"role": "user", "content": "?"}], [1, 2], "42", {"level": 3})
    with pytest.raises(UserError, match="rewards, and arithmetic, math_verify does not read"):
        scored_prompts([prompt], rollout, ["arithmetic", "math_verify"])
    (told,) = scored_prompts([prompt], rollout, ["mine.py:score"])
    assert told.index == 7 and told.ground_truth == "42"
    assert told.extra_info["level"] == 3
    assert told.extra_info["num_turns"] == 4
    assert told.extra_info["turn_scores"] == [0.5]
    assert [message["role"] for message in told.extra_info["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
