"""How far tokens move, by probability and sign, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qarl.tbpo.config import CLASSES, POLICIES
from qarl.tbpo.metrics import combine
from qarl.tbpo.reading import read
from qarl.tbpo.tokens import class_metrics, token_statistics

OLD = torch.tensor(
    [[0.5, 0.05, 0.005, 0.0005], [0.0005, 0.0005, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]]
).log()
MOVED = torch.tensor([[0.1, -0.2, 0.3, -0.4], [1.0, -3.0, 0.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
VALID = torch.tensor([[True] * 4, [True, True, True, False], [True] * 4])
ADVANTAGE = torch.tensor([2.0, -1.0, 0.0])
# The probabilities under the current policy: 0.55, 0.041, 0.0067, 0.00034; 0.0014, 0.000025, 0.9.
EXPECTED = {
    # The positive response has one token in each class, moved by 0.4, 0.3, 0.2 and 0.1, under both policies.
    **{
        f"tokens/pos_{policy}{label}_{what}": value
        for policy in POLICIES
        for label, moved in zip(CLASSES, (-0.4, 0.3, -0.2, 0.1), strict=True)
        for what, value in (
            ("frac", 0.25),
            ("moved_mean", abs(moved)),
            ("moved_max", abs(moved)),
            ("drift", moved),
        )
    },
    # Two of the negative response's three tokens are below 1e-3; the fourth is masked.
    "tokens/neg_tail_frac": 2 / 3,
    "tokens/neg_rare_frac": 0.0,
    "tokens/neg_unlikely_frac": 0.0,
    "tokens/neg_likely_frac": 1 / 3,
    "tokens/neg_tail_moved_mean": 2.0,
    "tokens/neg_tail_moved_max": 3.0,
    "tokens/neg_tail_drift": -1.0,
    "tokens/neg_likely_moved_mean": 0.0,
    "tokens/neg_likely_moved_max": 0.0,
    "tokens/neg_likely_drift": 0.0,
    # Under the current policy the first of them is above 1e-3.
    "tokens/neg_now_tail_frac": 1 / 3,
    "tokens/neg_now_rare_frac": 1 / 3,
    "tokens/neg_now_unlikely_frac": 0.0,
    "tokens/neg_now_likely_frac": 1 / 3,
    "tokens/neg_now_tail_moved_mean": 3.0,
    "tokens/neg_now_tail_moved_max": 3.0,
    "tokens/neg_now_tail_drift": -3.0,
    "tokens/neg_now_rare_moved_mean": 1.0,
    "tokens/neg_now_rare_moved_max": 1.0,
    "tokens/neg_now_rare_drift": 1.0,
    "tokens/neg_now_likely_moved_mean": 0.0,
    "tokens/neg_now_likely_moved_max": 0.0,
    "tokens/neg_now_likely_drift": 0.0,
}


def statistics_of(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, valid: torch.Tensor
) -> Any:
    return read([token_statistics(log_prob, old, old, advantage, valid)])[0]


@pytest.mark.parametrize("parts", [[slice(0, 3)], [slice(0, 1), slice(1, 2), slice(2, 3)]])
def test_by_hand_in_one_part_and_in_three(parts: list[slice]) -> None:
    statistics = [statistics_of(OLD[p] + MOVED[p], OLD[p], ADVANTAGE[p], VALID[p]) for p in parts]
    assert class_metrics(combine(statistics)) == pytest.approx(EXPECTED, rel=1e-5, abs=1e-6)


def test_the_policy_that_sampled_does_not_choose_the_class() -> None:
    """Its probabilities are another thousandth of the old ones, or nearly 1, or unknown."""
    for rollout in (OLD - 7.0, OLD / 1000, torch.full_like(OLD, torch.nan)):
        statistics = token_statistics(OLD + MOVED, OLD, rollout, ADVANTAGE, VALID)
        (total,) = read([statistics])
        assert class_metrics(total) == pytest.approx(EXPECTED, rel=1e-5, abs=1e-6)


def test_the_edges_of_the_classes() -> None:
    probabilities = torch.tensor([[0.9e-3, 1.1e-3, 0.9e-2, 1.1e-2, 0.09, 0.11, 1.0]])
    old = probabilities.log()
    metrics = class_metrics(
        statistics_of(old, old, torch.ones(1), torch.ones(old.shape, dtype=torch.bool))
    )
    for policy in POLICIES:
        assert [round(7 * metrics[f"tokens/pos_{policy}{label}_frac"]) for label in CLASSES] == [
            1,
            2,
            2,
            2,
        ]
