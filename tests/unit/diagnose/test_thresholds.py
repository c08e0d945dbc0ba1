"""Thresholds, shares and their intervals, by hand and against `qarl.metrics.estimates`, which is for accuracies."""

from __future__ import annotations

import numpy as np
import pytest

from qarl.diagnose import thresholds
from qarl.diagnose.thresholds import Sample, propose, rounded_up, share_above, threshold
from qarl.metrics.estimates import interval


def of_prompts(*values: list[float]) -> Sample:
    """The values of each prompt."""
    numbers = [number for number, row in enumerate(values) for _ in row]
    return Sample(np.concatenate([np.array(row, dtype=float) for row in values]), np.array(numbers))


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, 9), (0.2, 8), (0.25, 8), (0.299, 8), (0.3, 7), (0.5, 5), (0.05, 10)],
)
def test_a_threshold_is_the_smallest_value_that_loses_no_more_than_the_share(share, expected):
    values = np.array([3.0, 10, 1, 7, 5, 9, 2, 8, 4, 6])
    assert threshold(values, share) == expected
    assert (values > expected).mean() <= share < (values >= expected).mean()


def test_equal_values_are_not_split():
    """Half of the values are 2. A share of 30% cannot be lost above a value, so none of them is."""
    assert threshold(np.array([1.0] * 5 + [2.0] * 5), 0.3) == 2.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.2341, 1.24),
        (1.23, 1.23),
        (0.00123456, 0.00124),
        (9.999, 10.0),
        (12345.0, 12400.0),
        (-0.12341, -0.123),
        (0, 0),
    ],
)
def test_thresholds_are_rounded_up(value, expected):
    assert rounded_up(value) == expected >= value


def test_ratios_are_rounded_from_1():
    values = np.array([0.5, 1.0, 1.0021371, 3.0])
    assert threshold(values, 0.25, origin=1.0) == 1.00214
    assert threshold(values, 0.25) == 1.01


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_of_a_share_is_that_of_eval(seed):
    """With as many samples for each prompt, its interval of a mean over prompts is the same number."""
    random = np.random.default_rng(seed)
    rows = (random.random((12, 5)) < random.random((12, 1)) / 2).astype(float)
    share = share_above(of_prompts(*rows.tolist()), 0.5)
    expected = interval(rows.mean(1).tolist())
    assert (share.share, share.low, share.high) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )


def test_the_interval_of_no_loss_is_not_empty():
    """Wilson's upper limit for 0 of 10 prompts: Z^2 / (10 + Z^2) = 3.8415 / 13.8415."""
    share = share_above(of_prompts(*[[0.0, 0.0]] * 10), 1.0)
    assert (share.share, share.low) == (0.0, 0.0) and share.high == pytest.approx(
        0.277533, rel=1e-5
    )
    everything = share_above(of_prompts(*[[2.0, 2.0]] * 10), 1.0)
    assert everything.high == 1.0 and everything.low == pytest.approx(1 - 0.277533, rel=1e-5)


def test_responses_to_a_prompt_that_are_alike_widen_the_interval():
    alike = share_above(of_prompts(*([[1.0] * 8] * 5 + [[0.0] * 8] * 15)), 0.5)
    mixed = share_above(
        of_prompts(*[[1.0] * hits + [0.0] * (8 - hits) for hits in (1, 2, 3, 2)] * 5), 0.5
    )
    assert alike.share == mixed.share == 0.25
    assert alike.high - alike.low > 2 * (mixed.high - mixed.low)


def test_a_proposal_counts_what_it_loses_and_holds_on_other_prompts():
    """40 prompts; those of even number have 1 to 20, the others 101 to 120.

    A share of 25% of all is 10 values: 110. Of the even ones 5 of 20 are above 15, which all of the others are. Above
    115, for the others, are none of the even ones. The mean of both is 1/2."""
    rows = [[float(i // 2 + 1 + (100 if i % 2 else 0))] for i in range(40)]
    proposal = propose(of_prompts(*rows), 0.25)
    assert not isinstance(proposal, str)
    assert (proposal.value, proposal.loses, proposal.above, proposal.prompts_above) == (
        110,
        0.25,
        10,
        10,
    )
    assert proposal.on_other_prompts == 0.5
    assert proposal.low <= 110 <= proposal.high


@pytest.mark.parametrize(
    ("sample", "share", "why"),
    [
        (of_prompts([]), 0.1, "no sample"),
        (of_prompts([0.0] * 50, [0.0] * 50), 0.1, "nothing is to be corrected"),
        (
            of_prompts(*[[float(i)] for i in range(90)]),
            0.1,
            "only 9 of 90 samples, of 9 prompts, are above 80: raise",
        ),
        (
            of_prompts(*[list(np.arange(i, i + 1, 0.02)) for i in range(10)]),
            0.1,
            "samples, of 1 prompts",
        ),
    ],
)
def test_too_few_samples_give_no_threshold(sample, share, why):
    said = propose(sample, share)
    assert isinstance(said, str) and why in said


def test_the_interval_covers_the_true_threshold():
    """100 data sets of 60 prompts with a part that their five responses share; the true quantile is known.

    95% are promised. Below 85 of 100 would be a chance of 1 in 10^4."""
    true, covered = 1.6448536 * np.sqrt(2), 0  # the 95% quantile of a sum of two standard normals
    for seed in range(100):
        random = np.random.default_rng(seed)
        values = random.normal(size=(60, 1)) + random.normal(size=(60, 5))
        proposal = propose(Sample(values.ravel(), np.repeat(np.arange(60), 5)), 0.05)
        assert not isinstance(proposal, str)
        covered += proposal.low <= true <= proposal.high
    assert covered >= 85


def test_a_bootstrap_weights_prompts_and_not_samples(monkeypatch):
    """By hand: of prompts with the values (1, 1, 1) and (2,), the draws (0, 0), (0, 1) and (1, 1) have medians."""

    class Draws:
        def __init__(self) -> None:
            self.turns = iter(([0, 0], [0, 1], [1, 1]))

        def integers(self, high: int, size: int) -> np.ndarray:
            return np.array(next(self.turns))

    seen: list[list[float]] = []
    monkeypatch.setattr(thresholds, "DRAWS", 3)
    monkeypatch.setattr(thresholds.np.random, "default_rng", lambda seed: Draws())
    monkeypatch.setattr(
        thresholds.np, "quantile", lambda values, at: seen.append(values) or (0.0, 0.0)
    )
    thresholds._interval(of_prompts([1.0, 1.0, 1.0], [2.0]), 0.3, 0)
    # (0, 0): six times 1. (0, 1): one of four is above 1, no more than 30%. (1, 1): twice 2.
    assert seen == [[1.0, 1.0, 2.0]]
