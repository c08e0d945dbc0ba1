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


def swap_responses(rollout: RolloutBatch) -> None:
    every: tuple[list[Any], ...] = (rollout.response_token_ids, rollout.rollout_log_probs)
    for lists in every:
        lists[0], lists[1] = lists[1], lists[0]


CHANGES: dict[str, tuple[Callable[[RolloutBatch], object], str]] = {
    "stripped": (lambda r: r.response_token_ids[0].pop(), "response 0 of the step"),
    "completed": (
        lambda r: (r.response_token_ids[1].append(2), r.rollout_log_probs[1].append(0.0)),
        "response 1",
    ),
    "another token": (
        lambda r: r.response_token_ids[2].__setitem__(0, 1),
        "response 2 of the step",
    ),
    "another log-prob": (
        lambda r: r.rollout_log_probs[2].__setitem__(1, -2.0001),
        "response 2 of the step",
    ),
    "moved": (
        lambda r: r.response_token_ids[0].insert(0, r.prompt_token_ids[0].pop()),
        "response 0 of the step",
    ),
    "swapped": (swap_responses, "response 0 of the step and 1 more"),
    "left out": (
        lambda r: [
            column.pop()
            for column in (r.prompt_token_ids, r.response_token_ids, r.rollout_log_probs)
        ],
        "2 responses, of which 3 were sampled",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_is_not_made_of_changed_text(change: str) -> None:
    rollout = sampled()
    assert len(batch_of(rollout)) == 3
    spoil, where = CHANGES[change]
    spoil(rollout)
    with pytest.raises(UserError, match=r"not what was sampled") as error:
        batch_of(rollout)
    assert (error.value.where or "").startswith(where)


def test_what_does_not_come_from_an_engine_is_not_checked() -> None:
    rollout = sampled()
    assert len(batch_of(RolloutBatch(*list(vars(rollout).values())[:5]))) == 3


@pytest.mark.parametrize("trained", [[], [1, 2], [1, 2, 3]])
def test_a_response_may_be_cut_off_at_its_limit(trained: list[int]) -> None:
    refuse_other_tokens(trained, [1, 2, 3], "here")


@pytest.mark.parametrize(
    ("trained", "first"), [([1, 9, 3], 1), ([1, 2, 3, 4], 3), ([2, 3], 0), ([1, 3], 1)]
)
def test_other_tokens_are_refused(trained: list[int], first: int) -> None:
    with pytest.raises(
        UserError, match=f"here, from token {first} on \\(3 tokens sampled, {len(trained)} to be"
    ):
        refuse_other_tokens(trained, [1, 2, 3], "here")
