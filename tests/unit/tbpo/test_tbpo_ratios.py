"""Ratios, bands and weights of TBPO by hand, also far from 1."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.tbpo import TBPOConfig, tbpo_loss
from qarl.tbpo.loss import ratio_deviation, sequence_log_ratio

WIDEST = TBPOConfig(
    seq_clip_ratio_high=1e6,
    neg_seq_clip_ratio_low=1.0,
    neg_seq_clip_ratio_high=1e6,
    seq_tis_imp_ratio_cap=1e6,
)

NEAR_ONE = 2.0**-23
"""FP32's step at 1: a ratio is 1 + its deviation, so a tiny one has this absolute error."""


def test_a_log_ratio_is_the_mean_over_the_tokens_of_the_mask():
    log_prob = torch.tensor([[-1.0, -3.0, 99.0], [-2.0, math.nan, math.nan], [math.nan] * 3])
    old = torch.tensor([[-2.0, -6.0, 0.0], [-1.5, math.nan, math.nan], [math.nan] * 3])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert sequence_log_ratio(log_prob, old, mask).tolist() == [(1 + 3) / 2, -0.5, 0.0]


@pytest.mark.parametrize(
    "log_ratio", [-100.0, -2.0, -1e-4, 0.0, 3e-4, 1.0, 2.5, 5.0, 12.0, 19.5, 20.0]
)
def test_a_ratio_up_to_e_to_the_20_is_exact(log_ratio):
    assert ratio_deviation(torch.tensor(log_ratio)).item() == pytest.approx(
        math.expm1(log_ratio), rel=2e-6
    )


def test_a_larger_ratio_becomes_e_to_the_20():
    assert ratio_deviation(torch.tensor([20.5, 1e30])).tolist() == pytest.approx(
        [math.expm1(20)] * 2, rel=2e-6
    )


@pytest.mark.parametrize("log_w", [-13.0, -3.0, 3.0, 13.0])
def test_a_weight_far_from_1_is_exact_within_a_wide_cap(log_w):
    old = torch.full((1, 2), -1.0)
    log_prob = old.clone().requires_grad_()
    loss, _ = tbpo_loss(log_prob, old, old - log_w, torch.tensor([1.0]), torch.ones(1, 2), WIDEST)
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(log_w), rel=2e-6, abs=NEAR_ONE)
    assert log_prob.grad is not None
    assert log_prob.grad[0].tolist() == pytest.approx(
        [-math.exp(log_w) / 2] * 2, rel=2e-6, abs=NEAR_ONE
    )


@pytest.mark.parametrize("log_r", [-8.0, 3.0, 13.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_far_from_1_is_exact_within_wide_bands(log_r, advantage):
    old = torch.full((1, 2), -1.0)
    log_prob = (old + log_r).requires_grad_()
    loss, _ = tbpo_loss(log_prob, old, old, torch.tensor([advantage]), torch.ones(1, 2), WIDEST)
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * math.exp(log_r), rel=2e-6, abs=NEAR_ONE)
    assert log_prob.grad is not None
    assert log_prob.grad[0].tolist() == pytest.approx(
        [-advantage * math.exp(log_r) / 2] * 2, rel=2e-6, abs=NEAR_ONE
    )


def test_a_response_counts_once_whatever_its_length():
    """Losses -1.1 and 0.9 of three tokens and one, and an empty response, which does not count."""
    old = torch.full((3, 3), -1.0)
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    moved = torch.tensor([1.1, 0.9, 1.0]).log()[:, None]
    advantages = torch.tensor([1.0, -1.0, 7.0])
    log_prob = (old + moved).requires_grad_()
    loss, _ = tbpo_loss(log_prob, old, old, advantages, mask, WIDEST)
    loss.backward()
    assert loss.item() == pytest.approx((-1.1 + 0.9) / 2, abs=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.flatten().tolist() == pytest.approx(
        [*[-1.1 / 6] * 3, 0.45, *[0.0] * 5], rel=2e-6
    )
    whole, _ = tbpo_loss(old + moved, old, old, advantages, mask, WIDEST, global_batch_size=8)
    assert whole.item() == pytest.approx((-1.1 + 0.9) / 8, abs=1e-6)
