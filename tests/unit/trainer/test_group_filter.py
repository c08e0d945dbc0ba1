"""Dynamic sampling by hand: which groups a step trains on, and what was sampled."""

from __future__ import annotations

import pytest
import torch

from qarl.data.prompts import Prompt
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.group_filter import Scored, groups_that_differ

EQUAL = [0.7, 0.7]
OTHER = [1.0, 0.0]


def scored(*groups: list[float], first: int = 0, version: int = 3) -> Scored:
    """Groups of two responses. The prompt and the tokens of row i are `first` + i."""
    rewards = [reward for group in groups for reward in group]
    rows = range(first, first + len(rewards))
    responses = RolloutBatch(
        prompt_token_ids=[[row] for row in rows],
        response_token_ids=[[row, row + 100] for row in rows],
        rollout_log_probs=[[-0.5, -float(row)] for row in rows],
        finish_reasons=["stop" if row % 2 else "length" for row in rows],
        weight_version=version,
        preemptions=1,
        routed_experts=[torch.full((2, 1, 1), row, dtype=torch.uint8) for row in rows],
    )
    prompts = [Prompt(row, "x", [], [row], None) for row in rows]
    return Scored(prompts, responses, torch.tensor(rewards))


def filtered(*batches: Scored, groups: int = 2, limit: int = 5) -> tuple[Scored, dict[str, float]]:
    return groups_that_differ(lambda number: batches[number], groups=groups, size=2, limit=limit)


def test_a_batch_whose_groups_differ_is_taken_as_it_is() -> None:
    batch = scored(OTHER, [0.2, 0.4])
    chosen, metrics = filtered(batch)
    assert chosen.prompts == batch.prompts
    assert torch.equal(chosen.rewards, batch.rewards)
    assert chosen.responses.response_token_ids == batch.responses.response_token_ids
    assert metrics == {
        "filter_groups/num_gen_batches": 1,
        "filter_groups/dropped": 0,
        "filter_groups/equal": 0,
        "filter_groups/score_mean": pytest.approx(0.4),
    }


def test_groups_of_equal_rewards_are_replaced() -> None:
    """Rows 2, 3 are equal; of the second batch the first group fills the step, and the last is left over."""
    chosen, metrics = filtered(
        scored(OTHER, EQUAL), scored(EQUAL, [0.0, 1.0], OTHER, first=10), groups=2
    )
    assert [prompt.index for prompt in chosen.prompts] == [0, 1, 12, 13]
    assert chosen.rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    responses = chosen.responses
    assert responses.prompt_token_ids == [[0], [1], [12], [13]]
    assert responses.response_token_ids[2] == [12, 112]
    assert responses.rollout_log_probs[3] == [-0.5, -13.0]
    assert responses.finish_reasons == ["length", "stop", "length", "stop"]
    assert responses.routed_experts is not None
    assert [int(experts.max()) for experts in responses.routed_experts] == [0, 1, 12, 13]
    assert responses.top_token_ids is None and responses.conversations is None
    assert responses.weight_version == 3
    assert responses.preemptions == 2  # one in each of the two batches that were sampled
    assert metrics["filter_groups/num_gen_batches"] == 2
    assert metrics["filter_groups/dropped"] == pytest.approx(3 / 5)
    assert metrics["filter_groups/equal"] == 0
    assert metrics["filter_groups/score_mean"] == pytest.approx((1 + 1.4 + 1.4 + 1 + 1) / 10)


def test_the_cap_fills_the_batch_with_the_first_equal_groups() -> None:
    """No more than the cap is sampled, and the size of the batch stays."""
    chosen, metrics = filtered(
        scored(EQUAL, EQUAL), scored(EQUAL, OTHER, first=10), scored(OTHER, OTHER), limit=2
    )
    assert [prompt.index for prompt in chosen.prompts] == [12, 13, 0, 1]
    assert metrics["filter_groups/num_gen_batches"] == 2
    assert metrics["filter_groups/equal"] == 1
    assert metrics["filter_groups/dropped"] == pytest.approx(0.5)


def test_rewards_are_equal_if_their_bits_are() -> None:
    close = float(torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)))
    chosen, metrics = filtered(scored([0.7, close], EQUAL), scored(EQUAL, OTHER, first=4))
    assert [prompt.index for prompt in chosen.prompts] == [0, 1, 6, 7]
    assert metrics["filter_groups/equal"] == 0


def test_weights_that_change_between_two_batches() -> None:
    with pytest.raises(RuntimeError, match="versions"):
        filtered(scored(OTHER), scored(OTHER, version=4))
