"""Text that is not what was sampled is refused, wherever it was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qarl.errors import UserError
from qarl.rollout.engine import RolloutBatch
from qarl.rollout.response_fingerprint import fingerprint, refuse_other_tokens
from qarl.trainer.batch import make_batch


def sampled() -> RolloutBatch:
    prompts, responses = [[5, 6], [5, 6], [9]], [[1, 2, 3], [4], [7, 8]]
    log_probs = [[-0.5, -0.25, -1.0], [-0.1], [-3.0, -2.0]]
    prints = [fingerprint(*row) for row in zip(prompts, responses, log_probs, strict=True)]
    return RolloutBatch(prompts, responses, log_probs, ["stop"] * 3, 0, sampled=prints)


def batch_of(rollout: RolloutBatch) -> Any:
    count = len(rollout.response_token_ids)
    return make_batch(rollout, torch.zeros(count), torch.zeros(count), pad_token_id=0)


def strip_end(rollout: RolloutBatch) -> None:
    rollout.response_token_ids[0].pop()


def strip_end_and_log_prob(rollout: RolloutBatch) -> None:
    rollout.response_token_ids[0].pop()
    rollout.rollout_log_probs[0].pop()


def complete(rollout: RolloutBatch) -> None:
    rollout.response_token_ids[1].append(2)
    rollout.rollout_log_probs[1].append(0.0)


def replace_token(rollout: RolloutBatch) -> None:
    rollout.response_token_ids[2][0] = 1


def replace_log_prob(rollout: RolloutBatch) -> None:
    rollout.rollout_log_probs[2][1] = -2.0001


def edit_prompt(rollout: RolloutBatch) -> None:
    rollout.prompt_token_ids[1].insert(0, 3)


def move_a_token_from_prompt_to_response(rollout: RolloutBatch) -> None:
    rollout.response_token_ids[0].insert(0, rollout.prompt_token_ids[0].pop())


def swap_responses(rollout: RolloutBatch) -> None:
    every: tuple[list[Any], ...] = (rollout.response_token_ids, rollout.rollout_log_probs)
    for lists in every:
        lists[0], lists[1] = lists[1], lists[0]


def leave_one_out(rollout: RolloutBatch) -> None:
    for lists in (rollout.prompt_token_ids, rollout.response_token_ids, rollout.rollout_log_probs):
        lists.pop()


CHANGES: list[tuple[Callable[[RolloutBatch], None], str]] = [
    (strip_end, "response 0 of the step"),
    (strip_end_and_log_prob, "response 0 of the step"),
    (complete, "response 1 of the step"),
    (replace_token, "response 2 of the step"),
    (replace_log_prob, "response 2 of the step"),
    (edit_prompt, "response 1 of the step"),
    (move_a_token_from_prompt_to_response, "response 0 of the step"),
    (swap_responses, "response 0 of the step and 1 more"),
    (leave_one_out, "2 responses, of which 3 were sampled"),
]


@pytest.mark.parametrize(("change", "where"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_batch_is_not_made_of_changed_text(change: Callable[[RolloutBatch], None], where: str) -> None:
    rollout = sampled()
    assert len(batch_of(rollout)) == 3
    change(rollout)
    with pytest.raises(UserError, match=r"not what was sampled") as error:
        batch_of(rollout)
    assert error.value.where == where


def test_what_does_not_come_from_an_engine_is_not_checked() -> None:
    rollout = sampled()
    assert len(batch_of(RolloutBatch(*list(vars(rollout).values())[:5]))) == 3


@pytest.mark.parametrize("trained", [[], [1, 2], [1, 2, 3]])
def test_a_response_may_be_cut_off_at_its_limit(trained: list[int]) -> None:
    refuse_other_tokens(trained, [1, 2, 3], "here")


@pytest.mark.parametrize(("trained", "first"), [([1, 9, 3], 1), ([1, 2, 3, 4], 3), ([2, 3], 0), ([1, 3], 1)])
def test_other_tokens_are_refused(trained: list[int], first: int) -> None:
    with pytest.raises(UserError, match=f"here, from token {first} on \\(3 tokens sampled, {len(trained)} to be"):
        refuse_other_tokens(trained, [1, 2, 3], "here")
