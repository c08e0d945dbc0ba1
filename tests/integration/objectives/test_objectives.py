"""Every objective with every correction against float64 (`papers_losses`), loss and gradient, from a run's config."""

from __future__ import annotations

import pytest
import torch
from objective_cases import CORRECTIONS, LOSS_KEYS, B, call, parts, random_rows, run_config
from papers_losses import paper_loss, resolved_keys

from qarl.config import ConfigError
from qarl.config.objectives import objective_names
from qarl.objectives.loss import accepted_tokens, correction_weights
from qarl.objectives.metrics import reduce_metrics
from qarl.objectives.settings import objective_settings

pytestmark = pytest.mark.verl

REFUSED = {
    "tbpo": ("weight", "bypass", "rs_token"),
    "mis_gspo": ("weight", "bypass", "rs_token"),
    "gspo": ("rs_token",),
    "reinforce": ("bypass",),
}
"""Beginnings of the names of the corrections that contradict a loss."""
NO_BYPASS = {loss for loss, corrections in REFUSED.items() if "bypass" in corrections}


@pytest.fixture(scope="module")
def rows() -> dict[str, torch.Tensor]:
    return random_rows()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("loss", objective_names())
def test_equals_the_papers_formula(rows, loss, correction):
    if correction.startswith(REFUSED.get(loss, ("\0",))):
        with pytest.raises(ConfigError, match="rollout_correction"):
            run_config(loss, CORRECTIONS[correction])
        return
    for keys in LOSS_KEYS[loss]:
        config = run_config(loss, CORRECTIONS[correction], **keys)
        expected, gradient = paper_loss(loss, rows, resolved_keys(config), CORRECTIONS[correction])
        assert gradient.abs().max() > 0, "the row would hold for any loss"
        for micro in (1, 5):
            total, total_gradient, _ = call(rows, config, parts(micro))
            assert total == pytest.approx(expected, rel=2e-5, abs=1e-6), (keys, micro)
            torch.testing.assert_close(total_gradient.double(), gradient, rtol=5e-5, atol=1e-7)


def test_grpo_is_without_dual_clip_and_dual_clip_with_it(rows):
    """verl's `vanilla` has it at 3 by default: one negative token with a ratio of e^2 tells the two apart."""
    changed = {name: tensor.clone() for name, tensor in rows.items()}
    changed["log_prob"][1, 0] = changed["old_log_prob"][1, 0] + 2
    changed["advantages"][1] = -1.0
    gradients = [call(changed, run_config(loss, {}), parts(1))[1] for loss in ("grpo", "dual_clip")]
    assert gradients[0][1, 0] > 0 and gradients[1][1, 0] == 0
    differ = gradients[0] != gradients[1]
    assert differ.any(dim=1).nonzero().flatten().tolist() == [1]


def test_dr_grpo_sums_the_tokens_and_divides_by_a_constant(rows):
    config = run_config("grpo", {}, {"adv_estimator": "dr_grpo"})
    keys = resolved_keys(config) | {"loss_agg_mode": "seq-mean-token-sum-norm"}
    expected, gradient = paper_loss("grpo", rows, keys, {})
    total, total_gradient, _ = call(rows, config, parts(5))
    assert total == pytest.approx(expected, rel=2e-5)
    torch.testing.assert_close(total_gradient.double(), gradient, rtol=5e-5, atol=1e-7)


def test_without_any_valid_token_nothing_is_weighted_or_rejected(rows):
    both = CORRECTIONS["weight_token_truncate"] | CORRECTIONS["rs_seq_sum_k3"]
    correction = objective_settings(run_config("grpo", both)).correction
    old, rollout, empty = (
        rows["old_log_prob"],
        rows["rollout_log_prob"],
        torch.zeros_like(rows["response_mask"]),
    )
    assert not correction_weights(old, rollout, empty, correction).any()
    assert not accepted_tokens(old, old, rollout, empty, correction).any()


def test_the_share_that_is_rejected_is_reported(rows):
    """And the weights, over micro-batches."""
    correction = CORRECTIONS["weight_token_truncate"] | CORRECTIONS["rs_seq_sum_k3"]
    _, _, statistics = call(rows, run_config("grpo", correction), parts(5))
    metrics = reduce_metrics(statistics)
    mask, log_r = rows["response_mask"], (rows["old_log_prob"] - rows["rollout_log_prob"]).double()
    k3 = torch.where(mask, log_r.exp() - 1 - log_r, 0.0).sum(1)
    gone = mask.any(1) & (k3 > 0.2)
    assert 0 < gone.sum() < mask.any(1).sum()
    remaining = mask & ~gone[:, None]
    weights = log_r.exp().clamp(max=1.3)[remaining]
    expected = {
        "correction/rejected_response_frac": gone.sum() / mask.any(1).sum(),
        "correction/rejected_token_frac": mask[gone].sum() / mask.sum(),
        "correction/weight_mean": weights.mean(),
        "correction/weight_min": weights.min(),
        "correction/weight_max": weights.max(),
        "correction/weight_ess": weights.mean() ** 2 / weights.square().mean(),
        "correction/weight_zero_frac": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-6
    )


@pytest.mark.parametrize(
    ("loss", "bypass"),
    [
        *((loss, False) for loss in objective_names()),
        *((loss, True) for loss in objective_names() if loss not in NO_BYPASS),
    ],
)
def test_the_size_of_an_update_is_to_the_old_policy_whatever_the_ratio(rows, loss, bypass):
    """By float64. Lengths differ, so the largest |r - 1| and the largest |r - 1| sqrt(T) are of different responses."""
    changed = {name: tensor.clone() for name, tensor in rows.items()}
    lengths = changed["response_mask"].sum(1)
    short, long = lengths.masked_fill(lengths == 0, 99).argmin(), lengths.argmax()
    for row, moved in ((short, 0.5), (long, 0.45)):
        changed["log_prob"][row] = changed["old_log_prob"][row] + moved
    _, _, statistics = call(changed, run_config(loss, {"bypass_mode": bypass}), parts(5))
    mask = changed["response_mask"]
    log_ratio = torch.where(
        mask, (changed["log_prob"] - changed["old_log_prob"]).double(), 0.0
    ).sum(1)
    sizes = (log_ratio / lengths.clamp(min=1)).exp().sub(1).abs() * lengths.double().sqrt()
    metrics = reduce_metrics(statistics)
    assert metrics["actor/update_size"] == pytest.approx(float(sizes.max()), rel=1e-5)
    assert sizes.argmax() == long
    if loss in ("tbpo", "reinforce"):
        assert "actor/ratio_size" not in metrics
    else:
        assert (metrics["actor/ratio_size"] != metrics["actor/update_size"]) == bypass


def test_values_outside_the_mask_do_not_count(rows):
    spoilt = {name: tensor.clone() for name, tensor in rows.items()}
    for name in ("log_prob", "old_log_prob", "rollout_log_prob"):
        spoilt[name][~rows["response_mask"]] = float("nan")
    for loss in objective_names():
        correction = {} if loss in ("tbpo", "mis_gspo") else CORRECTIONS["weight_token_truncate"]
        config = run_config(loss, correction | CORRECTIONS["rs_seq_sum_k3"])
        loss_1, gradient_1, _ = call(rows, config, parts(2))
        loss_2, gradient_2, _ = call(spoilt, config, parts(2))
        assert loss_1 == loss_2 and torch.equal(gradient_1, gradient_2), loss


def test_tbpo_without_corrections_keeps_its_bits(rows):
    from qarl.tbpo import tbpo_loss

    config = run_config("tbpo", {})
    log_prob = rows["log_prob"].clone().requires_grad_()
    tensors = {**rows, "log_prob": log_prob}
    expected, statistics = tbpo_loss(
        **tensors, config=objective_settings(config).tbpo, global_batch_size=B - 4
    )
    expected.backward()
    total, gradient, parts_statistics = call(rows, config, parts(1))
    assert total == expected.item() and torch.equal(gradient, log_prob.grad)
    assert parts_statistics == [statistics]
