"""`qarl.step.updates` and `qarl.step.old_log_probs`: what a step compares, skips and drops, whatever the backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from qarl.step.old_log_probs import PassSchedule, drawn
from qarl.step.statistics import Counts, LogProbPairs
from qarl.step.updates import StepState, StepUpdates

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
ROLLOUT = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])


def two_ranks(numbers: Sequence[float]) -> list[float]:
    """As if another rank had the same counts."""
    return [2 * number for number in numbers]


def test_counts_leave_out_padding_and_take_nan_for_a_difference() -> None:
    own = ROLLOUT.clone()
    own[0, 1] += 0.25
    own[0, 2] = torch.nan
    counts = Counts.of(MASK, own, ROLLOUT)
    assert counts == Counts(responses=2, tokens=3, differing=1, delta=0.25)
    assert counts.response_length == 1.5 and counts.mismatch == pytest.approx(0.25 / 3)
    assert counts.over_ranks(two_ranks) == counts + counts
    own[1, 0] = torch.nan
    assert Counts.of(MASK, own, ROLLOUT).differing == 2


@pytest.mark.parametrize(
    ("relies", "differing", "compared", "dropped"),
    [
        ("auto", 1, True, True),
        ("auto", 0, True, False),
        ("rollout", 1, True, False),
        (None, 1, False, False),
    ],
)
def test_only_auto_drops_a_step(
    relies: str | None, differing: float, compared: bool, dropped: bool
) -> None:
    updates = StepUpdates(relies)
    assert updates.compares is compared and not updates.dropped
    updates.compared += Counts(tokens=4, differing=differing)
    assert updates.close(two_ranks) is compared
    assert updates.dropped is dropped and not updates.compares
    assert updates.compared.differing == (2 * differing if compared else differing)


def test_a_later_mini_batch_is_not_compared() -> None:
    updates = StepUpdates("auto")
    updates.close(two_ranks)
    updates.compared += Counts(tokens=1, differing=1)
    assert not updates.close(two_ranks) and updates.state is StepState.UPDATING


def test_gradients_that_are_not_finite_are_counted() -> None:
    updates = StepUpdates()
    for norm in (1.0, float("nan"), float("inf"), 0.0):
        updates.updated(norm)
    assert updates.skipped == 2


def test_when_a_source_skips_the_pass_and_what_its_metrics_say() -> None:
    schedule = PassSchedule("auto")
    assert not schedule.begin() and schedule.metrics["old_log_probs/recomputed"] == 1
    assert schedule.recomputed(0), "the next step skips"
    assert schedule.begin() and schedule.metrics["old_log_probs/from_rollout"] == 1
    schedule.sampled(2, 8)
    schedule.fell_back()
    assert not schedule.recomputed(3)
    assert schedule.metrics == {
        "old_log_probs/recomputed": 1.0,
        "old_log_probs/from_rollout": 0.0,
        "old_log_probs/fallback": 1.0,
        "old_log_probs/find_prob": 0.25,
    }
    assert not schedule.begin() and "old_log_probs/find_prob" not in schedule.metrics


@pytest.mark.parametrize(("mode", "skips"), [("rollout", True), ("recompute", False)])
def test_other_sources_decide_by_their_mode_after_the_first_step(mode: str, skips: bool) -> None:
    schedule = PassSchedule(mode)
    assert not schedule.begin()
    schedule.recomputed(5)
    assert schedule.begin() is skips


def test_drawn_rows_are_in_order_and_the_same_for_a_seed() -> None:
    rows = drawn(100, 10, seed=3).tolist()
    assert rows == sorted(set(rows)) == drawn(100, 10, seed=3).tolist() and len(rows) == 10
    assert rows != drawn(100, 10, seed=4).tolist()


def test_pairs_are_those_of_all_tokens_and_lengths_those_of_responses() -> None:
    pairs = LogProbPairs()
    assert pairs.mean_length == 0.0 and [len(part) for part in pairs.joined()] == [0, 0, 0]
    for _ in range(2):
        pairs.add(ROLLOUT - 1, ROLLOUT, MASK)
    own, rollout, lengths = pairs.joined()
    assert rollout.tolist() == [-1.0, -2.0, -0.5] * 2 and torch.equal(own, rollout - 1)
    assert lengths.tolist() == [2, 1, 0] * 2 and pairs.mean_length == 1.5


def test_a_rank_without_a_difference_drops_the_step_with_the_others() -> None:
    updates = StepUpdates("auto")
    updates.compared += Counts(tokens=4, differing=0)
    assert updates.close(lambda numbers: [number + 1 for number in numbers])
    assert updates.dropped and updates.compared.differing == 1
