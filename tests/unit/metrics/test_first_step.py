"""What a run says after its first step if that teaches nothing, in words that hold for every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qarl.metrics.tracker import Tracker

EQUAL: dict[str, Any] = {
    "actor/zero_advantage_frac": 1.0,
    "critic/score/min": 0.0,
    "critic/score/max": 0.0,
}
LEARNS = EQUAL | {"actor/zero_advantage_frac": 0.75, "critic/score/max": 1.0}
FILTERED = {"filter_groups/num_gen_batches": 10.0}
ONE_TURN = {"turns/max": 1.0}


def printed(folder: Path, *steps: dict[str, Any], start: int = 0) -> list[str]:
    """The messages of a run with these metrics of its steps, each message with its step."""
    messages: list[str] = []
    with Tracker(folder, [], 10, {}, start_step=start) as tracker:
        tracker.message = messages.append  # type: ignore[method-assign, assignment]  # records instead of printing
        for step, metrics in enumerate(steps, start + 1):
            tracker.log(metrics, step)
    return messages


def test_a_first_step_of_equal_rewards_says_so_at_once(tmp_path: Path) -> None:
    (message,) = printed(tmp_path, EQUAL, EQUAL)
    assert message.startswith("step 1: nothing can be learned from the first step: every response")
    assert "had the reward 0\n" in message and "reward function" in message


def test_an_environment_that_ends_every_conversation_is_named_beside_the_filter(
    tmp_path: Path,
) -> None:
    """Its groups are all equal, so the filter samples all its batches in every step, in vain."""
    (message,) = printed(tmp_path, EQUAL | FILTERED | ONE_TURN)
    assert "in all 10 batches that filter_groups sampled" in message
    assert "every conversation ended with its first turn" in message
    assert "rollout.environment" in message and "reward function" not in message
    assert "data.max_response_length has room" in message, "the other cause of a single turn"


def test_groups_may_be_equal_with_rewards_that_differ(tmp_path: Path) -> None:
    (message,) = printed(tmp_path, EQUAL | {"critic/score/max": 1.0})
    assert "all responses to each prompt had the same reward" in message


@pytest.mark.parametrize("metrics", [LEARNS, LEARNS | ONE_TURN, {"critic/score/min": 0.0}])
def test_a_first_step_that_teaches_says_nothing(tmp_path: Path, metrics: dict[str, Any]) -> None:
    assert printed(tmp_path, metrics, EQUAL) == []


def test_the_first_step_after_a_resume_is_not_the_first_of_the_run(tmp_path: Path) -> None:
    assert printed(tmp_path, LEARNS) == []
    assert printed(tmp_path, EQUAL, start=1) == []


def test_the_evaluation_before_it_is_not_the_first_step(tmp_path: Path) -> None:
    messages: list[str] = []
    with Tracker(tmp_path, [], 10, {}) as tracker:
        tracker.message = messages.append  # type: ignore[method-assign, assignment]  # records instead of printing
        tracker.log({"val/accuracy": 0.0}, 0)
        tracker.log(EQUAL, 1)
    assert len(messages) == 1 and messages[0].startswith("step 1: nothing can be learned")


def test_a_first_step_whose_responses_are_all_masked_teaches_nothing(tmp_path: Path) -> None:
    """No advantages are left then, so that no rewards are equal."""
    (message,) = printed(tmp_path, LEARNS | {"overlong/masked_frac": 1.0})
    assert "actor.mask_truncated_responses leaves them all out" in message
    assert not printed(tmp_path / "other", LEARNS | {"overlong/masked_frac": 0.9})
