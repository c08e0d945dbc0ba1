"""The metrics of TBPO worked by hand, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from papers_contributions import paper_metrics
from tbpo_batches import WIDE, make_batch

from qarl.tbpo import TBPOConfig, reduce_metrics, tbpo_loss


def test_metrics_by_hand() -> None:
    # Positive band up to 1.2, negative [0.9, 1.3], cap 2. Six responses count, the last row is empty.
    ratios = [1.1, 1.4, 1.5, 1.0, 0.85, 0.8, 7.0]
    weights = [1.0, 4.0, 1.0, 0.25, 1.0, 1.0, 9.0]
    advantages = torch.tensor([2.0, 1.0, -1.0, -3.0, -2.0, 0.0, 5.0])
    batch = make_batch(ratios, weights, [5, 4, 3, 2, 4, 1, 0])
    config = TBPOConfig(**WIDE, band_reference_length=5)
    _, statistics = tbpo_loss(advantages=advantages, config=config, **batch)
    expected = {
        "actor/pos_outside_band_frac": 1 / 2,  # 1.4 of 1.1, 1.4
        "actor/neg_outside_band_frac": 2 / 3,  # 1.5, 0.85 of 1.5, 1.0, 0.85
        "actor/inside_band_frac": 2 / 5,
        "actor/zero_advantage_frac": 1 / 6,
        "actor/seq_ratio_mean": (1.1 + 1.4 + 1.5 + 1.0 + 0.85 + 0.8) / 6,
        "actor/seq_ratio_min": 0.8,
        "actor/seq_ratio_max": 1.5,
        "actor/seq_ratio_abs_dev_max": 0.5,
        "actor/update_size": 0.5 * 3**0.5,  # 1.5 over 3 tokens; 1.4 over 4 is 0.8
        "actor/seq_tis_imp_ratio_mean": (1 + 4 + 1 + 0.25 + 1 + 1) / 6,
        "actor/seq_tis_imp_ratio_max": 4.0,
        "actor/seq_tis_above_cap_frac": 1 / 6,
        "actor/seq_tis_below_cap_frac": 1 / 6,
        # |r - 1| sqrt(T / 5) of the five with A != 0: 0.1, 0.4 sqrt(0.8), 0.5 sqrt(0.6), 0, 0.15 sqrt(0.8), that is
        # 0.1, 0.3578, 0.3873, 0, 0.1342. Sorted, 95% lies 0.8 of the way from the fourth to the fifth.
        "actor/band_p95": 0.3577709 + 0.8 * (0.3872983 - 0.3577709),
        # Distances in bands: 0.1 / 0.2, 0.4 / 0.2, 0.5 / 0.3, 0, 0.15 / 0.1, of which the largest two are 5/3 and 2.
        "actor/band_factor_p95": 5 / 3 + 0.8 / 3,
    }
    expected |= paper_metrics(**batch, advantages=advantages)
    assert reduce_metrics([statistics]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def bad_input(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "log_prob": torch.full((2, 3), -1.0),
        "old_log_prob": torch.full((2, 3), -1.0),
        "rollout_log_prob": torch.full((2, 3), -1.0),
        "advantages": torch.ones(2),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "config": TBPOConfig(),
    }
    for name, change in changes.items():
        if isinstance(change, tuple):
            row, position, value = change
            good[name] = good[name].float().clone()
            good[name][row, position] = value
        else:
            good[name] = change
    return good


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_prob": None}, "rollout_log_prob is missing"),
        (
            {"old_log_prob": torch.zeros(2, 4)},
            r"old_log_prob has shape \(2, 4\), log_prob \(2, 3\)",
        ),
        ({"response_mask": torch.ones(2)}, r"response_mask has shape \(2,\)"),
        (
            {"advantages": torch.ones(3)},
            r"advantages has shape \(3,\), expected \(2, 3\) or \(2,\)",
        ),
        ({"advantages": torch.ones(2, 1)}, r"advantages has shape \(2, 1\)"),
        ({"log_prob": (1, 2, float("nan"))}, "log_prob is NaN or Inf at row 1, position 2"),
        ({"old_log_prob": (0, 1, float("inf"))}, "old_log_prob is NaN or Inf at row 0, position 1"),
        (
            {"rollout_log_prob": (1, 0, float("-inf"))},
            "rollout_log_prob is NaN or Inf at row 1, position 0",
        ),
        (
            {"advantages": torch.tensor([1.0, float("nan")])},
            "advantages is NaN or Inf at row 1, position 0",
        ),
        ({"response_mask": (1, 1, 0.5)}, "response_mask is neither 0 nor 1 at row 1, position 1"),
        (
            {"response_mask": (1, 1, float("nan"))},
            "response_mask is neither 0 nor 1 at row 1, position 1",
        ),
        (
            {"advantages": torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]])},
            "varies within a response.*row 0, position 1",
        ),
        ({"global_batch_size": 1}, "global_batch_size is 1 but this call alone has 2"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    tbpo_loss(**bad_input())
    with pytest.raises(ValueError, match=message):
        tbpo_loss(**bad_input(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_clip_ratio_high", 0.0),
        ("seq_clip_ratio_low", 1.5),
        ("neg_seq_clip_ratio_low", -3e-4),
        ("neg_seq_clip_ratio_high", float("inf")),
        ("seq_tis_imp_ratio_cap", 0.5),
        ("mismatch_outside_cap", "clip"),
        ("positive_band", "lower"),
        ("band_scaling", "tokens"),
        ("band_reference_length", 0),
        ("loss_agg_mode", "token-mean"),
    ],
)
def test_bad_config_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        TBPOConfig(**{field: value})
