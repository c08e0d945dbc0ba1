"""C(r), K1 and K3 of both ratios (arXiv 2605.14220, section 4.1): by their formulas, by hand, and in every loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from papers_contributions import paper_metrics
from tbpo_batches import WIDE

from qarl.metrics.warning_signs import SignFinder
from qarl.objectives.metrics import loss_statistics, reduce_metrics
from qarl.tbpo import TBPOConfig, tbpo_loss
from qarl.tbpo.reading import read

LENGTHS = (9, 3, 5, 0, 7, 1, 9, 4)
ADVANTAGES = (1.5, -0.5, 0.0, 2.0, -2.0, 0.25, 1.0, -1.0)


def random_rows(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    old = -3 * torch.rand(shape, generator=random) - 0.05
    rows = {
        "log_prob": old + 0.5 * torch.randn(shape, generator=random),
        "old_log_prob": old,
        "rollout_log_prob": old + 0.5 * torch.randn(shape, generator=random),
    }
    rows = {name: values.masked_fill(~mask, math.nan) for name, values in rows.items()}
    return rows | {"advantages": torch.tensor(ADVANTAGES), "response_mask": mask}


def of_tbpo(rows: dict[str, torch.Tensor]) -> dict[str, Any]:
    return tbpo_loss(**rows, config=TBPOConfig(**WIDE))[1]


def of_other_losses(rows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As `objective_loss` calls it with bypass_mode, where the loss has the ratio to the rollout."""
    mask = rows["response_mask"]
    new, old, rollout = (
        rows[name].masked_fill(~mask, 0.0)
        for name in ("log_prob", "old_log_prob", "rollout_log_prob")
    )
    return read([loss_statistics(new, old, rollout, rollout, rows["advantages"], mask, {})])[0]


@pytest.mark.parametrize("statistics_of", [of_tbpo, of_other_losses])
@pytest.mark.parametrize("parts", [[slice(0, 8)], [slice(0, 3), slice(3, 4), slice(4, 8)]])
@pytest.mark.parametrize("seed", range(3))
def test_the_papers_formulas_token_by_token(
    statistics_of: Any, parts: list[slice], seed: int
) -> None:
    rows = random_rows(seed)
    statistics = [
        statistics_of({name: values[part] for name, values in rows.items()}) for part in parts
    ]
    metrics = reduce_metrics(statistics)
    expected = paper_metrics(**rows)
    assert len(expected) == 8
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("statistics_of", [of_tbpo, of_other_losses])
def test_errors_that_cancel_in_the_mean_of_a_response_are_seen(statistics_of: Any) -> None:
    """Two responses of 50 tokens. In each, one token is off by +2 nats and another by -2: equation 5 of each sign is
    -(e^2 + e^-2 - 2) A / 100 = -0.0552 A. The geometric mean of a response is 1."""
    old = torch.full((2, 50), -3.0)
    error = torch.zeros(2, 50)
    error[:, 10] = 2.0
    error[:, 20] = -2.0
    rows = {
        "log_prob": old + error,
        "old_log_prob": old,
        "rollout_log_prob": old + error,
        "advantages": torch.tensor([1.0, -1.0]),
        "response_mask": torch.ones(2, 50, dtype=torch.bool),
    }
    metrics = reduce_metrics([statistics_of(rows)])
    once = (math.e**2 + math.e**-2 - 2) / 100
    assert once == pytest.approx(0.0552, abs=5e-5)
    expected = {
        "actor/zero_centred_loss_pos": -once,
        "actor/zero_centred_loss_neg": once,
        "actor/rollout_zero_centred_loss_pos": 0.0,
        "actor/rollout_zero_centred_loss_neg": 0.0,
        "actor/k1": 0.0,
        "actor/k3": 2 * once,
        "actor/rollout_k1": 0.0,
        "actor/rollout_k3": 0.0,
        "actor/seq_ratio_mean": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("statistics_of", [of_tbpo, of_other_losses])
def test_a_batch_without_tokens_has_none_of_these_metrics(statistics_of: Any) -> None:
    rows = random_rows(0)
    rows["response_mask"] = torch.zeros_like(rows["response_mask"])
    assert reduce_metrics([statistics_of(rows)]) == {}


def test_a_ratio_beyond_the_bound_stays_finite() -> None:
    rows = {
        "log_prob": torch.full((1, 4), -1.0),
        "old_log_prob": torch.full((1, 4), -900.0),
        "rollout_log_prob": torch.full((1, 4), -1.0),
        "advantages": torch.ones(1),
        "response_mask": torch.ones(1, 4, dtype=torch.bool),
    }
    metrics = reduce_metrics([of_tbpo(rows)])
    assert metrics["actor/zero_centred_loss_pos"] == pytest.approx(-math.expm1(20.0))
    assert metrics["actor/k1"] == pytest.approx(-899.0)
    assert math.isfinite(metrics["actor/k3"])


def step_with_errors(step: int, of_tokens: float) -> dict[str, float]:
    """The metrics of a step with noise. `of_tokens`: share of the tokens of negative samples that the trainer's old
    log-probs miss by +2 nats; the same share is missed by -2, so that no mean over a response sees them."""
    random = torch.Generator().manual_seed(step)
    old = torch.full((32, 100), -3.0)
    advantages = torch.tensor([1.0, -1.0]).repeat(16)
    error = 0.01 * torch.randn(32, 100, generator=random)
    pairs = round(of_tokens * 100)
    error[1::2, :pairs] += 2.0
    error[1::2, pairs : 2 * pairs] -= 2.0
    rows = {
        "log_prob": old + 0.01 * torch.randn(32, 100, generator=random),
        "old_log_prob": old,
        "rollout_log_prob": old + error,
        "advantages": advantages,
        "response_mask": torch.ones(32, 100, dtype=torch.bool),
    }
    return reduce_metrics([of_tbpo(rows)])


@pytest.mark.parametrize(("of_tokens", "signs"), [(0.0, []), (0.02, ["skew"])])
def test_the_sign_skew_sees_token_errors_of_negative_samples(
    of_tokens: float, signs: list[str]
) -> None:
    finder = SignFinder()
    found = []
    for step in range(1, 61):
        metrics = step_with_errors(step, of_tokens if step > 30 else 0.0)
        assert metrics["actor/seq_tis_imp_ratio_max"] == pytest.approx(1.0, abs=0.01)
        found += finder.add(step, metrics)
    assert [sign.sign for sign in found] == signs
