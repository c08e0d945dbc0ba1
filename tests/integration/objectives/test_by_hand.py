"""Every objective, weight, rejection and average on responses of two or three tokens, against numbers worked by hand.

A response has old log-probs of -1. `r` are the ratios of its tokens to the old policy, r_corr those of the old policy
to the rollout. A token's loss has the formula of docs/understand/objectives.md, and so of the paper that is named
there. The losses are verl's own functions, except tbpo, so each row also compares verl with the paper.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objective_cases import rejected, run_config, weighted

from qarl.config.actor import REJECTIONS
from qarl.config.objectives import objective_names
from qarl.objectives.loss import correction_weights, objective_loss
from qarl.objectives.settings import objective_settings

pytestmark = pytest.mark.verl

LN3 = math.log(3)


def responses(
    advantages: list[float], ratios: list[list[float]], mismatches: list[list[float]] | None = None
) -> dict[str, torch.Tensor]:
    """A batch of these responses, padded with NaN."""
    width = max(map(len, ratios))

    def padded(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [math.nan] * (width - len(row)) for row in rows]).log()

    mask = torch.tensor([[t < len(row) for t in range(width)] for row in ratios])
    old = torch.full(mask.shape, -1.0).masked_fill(~mask, math.nan)
    return {
        "log_prob": (old + padded(ratios)).requires_grad_(),
        "old_log_prob": old,
        "rollout_log_prob": old - padded(mismatches or [[1.0] * len(row) for row in ratios]),
        "advantages": torch.tensor(advantages),
        "response_mask": mask,
    }


def loss_and_gradient(
    batch: dict[str, torch.Tensor],
    loss: str,
    correction: dict[str, Any],
    algorithm: dict[str, Any],
    **keys: Any,
) -> tuple[float, torch.Tensor]:
    settings = objective_settings(run_config(loss, correction, algorithm, **keys))
    mask = batch["response_mask"]
    weight = correction_weights(
        batch["old_log_prob"], batch["rollout_log_prob"], mask, settings.correction
    )
    counts = {"responses": int(mask.any(1).sum()), "tokens": int(mask.sum())}
    value, _ = objective_loss(**batch, settings=settings, weight=weight, **counts)
    value.backward()
    gradient = batch["log_prob"].grad
    assert gradient is not None
    return value.item(), gradient


BANDS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
TBPO = {"seq_clip_ratio_high": 0.2, "neg_seq_clip_ratio_low": 0.1, "neg_seq_clip_ratio_high": 0.3}
# loss, keys, A, r of each token, r_corr of each token -> loss, gradient of each token.
OBJECTIVES: list[
    tuple[str, dict[str, Any], float, list[float], list[float], float, list[float]]
] = [
    # (-1.1 - 1.2) / 2: the second is clipped from 1.5. A gradient is r times that of r.
    ("grpo", {}, 1.0, [1.1, 1.5], [1, 1], -1.15, [-0.55, 0.0]),
    # No lower clip for A > 0: (-0.5 - 0.9) / 2.
    ("grpo", {}, 1.0, [0.5, 0.9], [1, 1], -0.7, [-0.25, -0.45]),
    # A < 0: no upper clip, and 0.5 is clipped to 0.8: (1.5 + 0.8) / 2.
    ("grpo", {}, -1.0, [1.5, 0.5], [1, 1], 1.15, [0.75, 0.0]),
    # Without dual clip a ratio of 10 keeps its gradient: (10 + 2) / 2.
    ("grpo", {}, -1.0, [10.0, 2.0], [1, 1], 6.0, [5.0, 1.0]),
    ("grpo", BANDS, -2.0, [1.0, 0.85], [1, 1], 1.9, [1.0, 0.0]),
    ("grpo", BANDS, 2.0, [1.15, 1.25], [1, 1], -2.35, [-1.15, 0.0]),
    # At most c: (3 + 2) / 2; a positive advantage is clipped as in grpo.
    ("dual_clip", {}, -1.0, [4.0, 2.0], [1, 1], 2.5, [0.0, 1.0]),
    ("dual_clip", {"clip_ratio_c": 5.0}, -1.0, [4.0, 6.0], [1, 1], 4.5, [2.0, 0.0]),
    ("dual_clip", {}, 1.0, [4.0, 2.0], [1, 1], -1.2, [0.0, 0.0]),
    ("positive_only", {}, 2.0, [1.1, 1.5], [1, 1], -2.3, [-1.1, 0.0]),
    ("positive_only", {}, -1.0, [1.1, 0.5], [1, 1], 0.0, [0.0, 0.0]),
    # s = sqrt(1.21) = 1.1, inside: -2 * 1.1, and each token has half of it.
    ("gspo", BANDS, 2.0, [1.21, 1.0], [1, 1], -2.2, [-1.1, -1.1]),
    # s = 1.3, clipped to 1.2. s = 0.8: no lower clip for A > 0.
    ("gspo", BANDS, 2.0, [1.69, 1.0], [1, 1], -2.4, [0.0, 0.0]),
    ("gspo", BANDS, 2.0, [0.64, 1.0], [1, 1], -1.6, [-0.8, -0.8]),
    # A < 0: 0.8 is clipped to 0.9, and 1.3 is not clipped.
    ("gspo", BANDS, -1.0, [0.64, 1.0], [1, 1], 0.9, [0.0, 0.0]),
    ("gspo", BANDS, -1.0, [1.69, 1.0], [1, 1], 1.3, [0.65, 0.65]),
    # The paper's 4e-4 above and 3e-4 below.
    ("gspo", {}, 1.0, [1.0005], [1], -1.0004, [0.0]),
    ("gspo", {}, 1.0, [1.0003], [1], -1.0003, [-1.0003]),
    ("gspo", {}, -1.0, [0.9996], [1], 0.9997, [0.0]),
    ("gspo", {}, -1.0, [0.9998], [1], 0.9998, [0.9998]),
    # Times the product of r_corr: 1.5 * 1.2 = 1.8, or 0.1, which has no lower bound; 2.4 is above the cap.
    ("mis_gspo", BANDS, 2.0, [1.21, 1.0], [1.5, 1.2], -3.96, [-1.98, -1.98]),
    ("mis_gspo", BANDS, 2.0, [1.21, 1.0], [0.5, 0.2], -0.22, [-0.11, -0.11]),
    ("mis_gspo", BANDS, 2.0, [1.21, 1.0], [2.0, 1.2], 0.0, [0.0, 0.0]),
    (
        "mis_gspo",
        BANDS | {"mis_imp_ratio_cap": 3.0},
        2.0,
        [1.21, 1.0],
        [2.0, 1.2],
        -5.28,
        [-2.64, -2.64],
    ),
    # A < 0, s = 0.8 clipped to 0.9: 1.8 * 0.9.
    ("mis_gspo", BANDS, -1.0, [0.64, 1.0], [1.5, 1.2], 1.62, [0.0, 0.0]),
    # sigmoid(0) = 1/2: -4 / 2 each. The gate's slope at 1 is 1.
    ("sapo", {}, 1.0, [1.0, 1.0], [1, 1], -2.0, [-0.5, -0.5]),
    # sigmoid(ln 3) = 3/4: -(3 + 2) / 2. Slope 4 * 3/4 * 1/4 = 3/4, times r.
    ("sapo", {}, 1.0, [1 + LN3, 1.0], [1, 1], -2.5, [-0.375 * (1 + LN3), -0.5]),
    # tau = 2 for A < 0: 4 / 2 * (3/4 + 1/2) / 2. tau = 1 for A > 0 is left alone.
    (
        "sapo",
        {"tau_neg": 2.0},
        -1.0,
        [1 + LN3 / 2, 1.0],
        [1, 1],
        1.25,
        [0.375 * (1 + LN3 / 2), 0.5],
    ),
    (
        "sapo",
        {"tau_pos": 2.0},
        1.0,
        [1 + LN3 / 2, 1.0],
        [1, 1],
        -1.25,
        [-0.375 * (1 + LN3 / 2), -0.5],
    ),
    # -log_prob * A with log-probs of -1 and -1 - ln 3: (2 + 2 + 2 ln 3) / 2.
    ("reinforce", {}, 2.0, [1.0, 1 / 3], [1, 1], 2 + LN3, [-1.0, -1.0]),
    ("reinforce", {}, -1.0, [1.0, 1.0], [1, 1], -1.0, [0.5, 0.5]),
    # s = 1.1, w = sqrt(4) = 2: -2 * 1.1 * 2. w = sqrt(9) = 3 is clipped to 2, w = 1/3 to 1/2.
    ("tbpo", TBPO, 2.0, [1.21, 1.0], [4, 1], -4.4, [-2.2, -2.2]),
    ("tbpo", TBPO, 2.0, [1.21, 1.0], [9, 1], -4.4, [-2.2, -2.2]),
    ("tbpo", TBPO, 2.0, [1.21, 1.0], [1 / 9, 1], -1.1, [-0.55, -0.55]),
    # A < 0: 1.25 is inside [0.9, 1.3], 1.4 is clipped to 1.3 and 0.8 to 0.9.
    ("tbpo", TBPO, -1.0, [1.5625, 1.0], [1, 1], 1.25, [0.625, 0.625]),
    ("tbpo", TBPO, -1.0, [1.96, 1.0], [1, 1], 1.3, [0.0, 0.0]),
    ("tbpo", TBPO, -1.0, [0.64, 1.0], [1, 1], 0.9, [0.0, 0.0]),
]


@pytest.mark.parametrize(
    ("loss", "keys", "advantage", "r", "r_corr", "expected", "gradient"), OBJECTIVES
)
def test_one_response(loss, keys, advantage, r, r_corr, expected, gradient):
    value, computed = loss_and_gradient(responses([advantage], [r], [r_corr]), loss, {}, {}, **keys)
    assert value == pytest.approx(expected, rel=2e-6, abs=1e-7)
    assert computed[0].tolist() == pytest.approx(gradient, rel=2e-6, abs=1e-7)


def test_the_table_has_every_objective_with_both_signs():
    assert {(row[0], row[2] > 0) for row in OBJECTIVES} == {
        (loss, sign) for loss in objective_names() for sign in (True, False)
    }


# Keys of the correction, r_corr of two tokens -> their weights.
WEIGHTS: list[tuple[dict[str, Any], list[float], list[float]]] = [
    (weighted("token"), [4.0, 1.5], [2.0, 1.5]),
    (weighted("token"), [0.1, 0.5], [0.1, 0.5]),
    (weighted("token", rollout_is_threshold=1.2), [4.0, 1.1], [1.2, 1.1]),
    (weighted("token", "clip"), [0.1, 4.0], [0.5, 2.0]),
    (weighted("token", "clip", rollout_is_threshold_lower=0.9), [0.1, 0.95], [0.9, 0.95]),
    (weighted("token", "mask"), [0.1, 4.0], [0.1, 0.0]),
    (weighted("token", "icepop"), [0.1, 4.0], [0.0, 0.0]),
    (weighted("token", "icepop"), [0.6, 1.9], [0.6, 1.9]),
    # The product, 1.8 and 6. The geometric mean, 2 and 3.
    (weighted("sequence"), [1.5, 1.2], [1.8, 1.8]),
    (weighted("sequence"), [4.0, 1.5], [2.0, 2.0]),
    (weighted("sequence", "mask"), [4.0, 1.5], [0.0, 0.0]),
    (weighted("sequence", "clip"), [0.1, 1.5], [0.5, 0.5]),
    (weighted("sequence", "icepop"), [0.1, 1.5], [0.0, 0.0]),
    (weighted("geometric"), [4.0, 1.0], [2.0, 2.0]),
    (weighted("geometric"), [9.0, 1.0], [2.0, 2.0]),
    (weighted("geometric", rollout_is_threshold=4.0), [9.0, 1.0], [3.0, 3.0]),
    (weighted("geometric", "clip"), [0.04, 1.0], [0.5, 0.5]),
    (weighted("geometric", "mask"), [9.0, 1.0], [0.0, 0.0]),
    (weighted("geometric", "icepop"), [0.04, 1.0], [0.0, 0.0]),
    # After the bounds the mean, 1.25, becomes 1.
    (
        weighted("token", rollout_is_batch_normalize=True, rollout_is_threshold=1.5),
        [9.0, 1.0],
        [1.2, 0.8],
    ),
]


@pytest.mark.parametrize(("correction", "r_corr", "weights"), WEIGHTS, ids=str)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_weight_multiplies_the_loss_and_its_gradient(correction, r_corr, weights, advantage):
    value, gradient = loss_and_gradient(
        responses([advantage], [[1.1, 1.1]], [r_corr]), "grpo", correction, {}
    )
    assert value == pytest.approx(-1.1 * advantage * sum(weights) / 2, rel=2e-6)
    assert gradient[0].tolist() == pytest.approx(
        [-1.1 * advantage * weight / 2 for weight in weights], rel=2e-6
    )


def test_normalised_weights_of_responses_have_a_mean_over_responses():
    """Products 1.5 (one token) and 0.5 (two): their mean over responses is 1, over tokens it would be 5/6."""
    batch = responses([1.0, 1.0], [[1.1], [1.1, 1.1]], [[1.5], [0.5, 1.0]])
    value, _ = loss_and_gradient(
        batch, "grpo", weighted("sequence", rollout_is_batch_normalize=True), {}
    )
    assert value == pytest.approx(-1.1 * (1.5 + 0.5) / 2, rel=2e-6)


# r_corr = (e^-0.3, 1): K1 = (0.3, 0), K2 = (0.045, 0), K3 = (e^-0.3 - 1 + 0.3, 0).
K3 = math.exp(-0.3) - 0.7
DIVERGENCES = {
    "token_k1": 0.3, "token_k2": 0.045, "token_k3": K3,
    "seq_sum_k1": 0.3, "seq_sum_k2": 0.045, "seq_sum_k3": K3,
    "seq_mean_k1": 0.15, "seq_mean_k2": 0.0225, "seq_mean_k3": K3 / 2,
    "seq_max_k2": 0.045, "seq_max_k3": K3,
}  # fmt: skip


@pytest.mark.parametrize("option", REJECTIONS)
@pytest.mark.parametrize("ratio", ["corr", "ppo"])
def test_a_rejection_begins_just_above_its_threshold(option, ratio):
    """The responses of a mini-batch: one with a mismatch (or an update), one without. Both are in the denominator."""
    large, none = [math.exp(-0.3), 1.0], [1.0, 1.0]
    changed, other = (
        ([large, none], [none, none]) if ratio == "ppo" else ([none, none], [large, none])
    )
    # r_ppo is the product of both, so the mismatch of the second response is undone by its update.
    if ratio == "ppo":
        changed[1], other[1] = [2.0, 1.0], [0.5, 1.0]
    gradients = {}
    for factor in (0.99, 1.01):
        correction = rejected(option, bound=DIVERGENCES[option] * factor, rollout_rs_ratio=ratio)
        _, gradients[factor] = loss_and_gradient(
            responses([-1.0, -1.0], changed, other), "reinforce", correction, {}
        )
    # -log_prob * A with A = -1: each token of a response of two has 1/4.
    assert gradients[1.01].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    rest = [0.0, 0.5] if option.startswith("token") else [0.0, 0.0]
    assert gradients[0.99].tolist() == [rest, [0.25, 0.25]]


def test_k1_has_a_sign_and_a_lower_threshold():
    """r_corr = (e^0.3, 1): K1 = (-0.3, 0), far below every upper threshold."""
    rows = ([1.0], [[1.0, 1.0]], [[math.exp(0.3), 1.0]])
    for lower, learns in ((None, True), (-0.31, True), (-0.29, False)):
        correction = rejected("seq_sum_k1", bound=0.1) | {"rollout_rs_threshold_lower": lower}
        _, gradient = loss_and_gradient(responses(*rows), "grpo", correction, {})
        assert bool(gradient.any()) == learns, lower


@pytest.mark.parametrize(("threshold", "learns"), [(0.36, True), (0.37, False)])
def test_the_veto_looks_at_the_old_probability(threshold, learns):
    """e^-1 = 0.3679, whatever the new policy and the rollout say."""
    batch = responses([1.0], [[1.1, 0.1]], [[0.5, 2.0]])
    _, gradient = loss_and_gradient(batch, "grpo", {"veto_threshold": threshold}, {})
    assert bool(gradient.any()) == learns


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_bypass_clips_the_ratio_to_the_rollout(loss):
    """r = 1.1 and r_corr = 1.05: r_ppo = 1.155, whose loss is -1.155. With r_corr = 1.2 it is 1.32, clipped to 1.2."""
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    for r_corr, expected in ((1.05, 1.155), (1.2, 1.2)):
        batch = responses([1.0], [[1.1, 1.1]], [[r_corr, r_corr]])
        value, gradient = loss_and_gradient(batch, loss, {"bypass_mode": True}, {}, **keys)
        assert value == pytest.approx(-expected, rel=2e-6)
        assert bool(gradient.any()) == (r_corr == 1.05)


# Token losses -1.1 (A = 1, one token) and 0.9, 1, 1.1 (A = -1), and a response without tokens, which does not count.
AVERAGES = {
    "seq-mean-token-mean": ((-1.1 + 1.0) / 2, [1 / 2, 1 / 6]),
    "seq-mean-token-sum": ((-1.1 + 3.0) / 2, [1 / 2, 1 / 2]),
    "seq-mean-token-sum-norm": (
        (-1.1 + 3.0) / 2 / 12,
        [1 / 24, 1 / 24],
    ),  # data.max_response_length is 12
    "token-mean": ((-1.1 + 3.0) / 4, [1 / 4, 1 / 4]),
}


@pytest.mark.parametrize("loss", ["grpo", "dual_clip", "reinforce", "positive_only"])
@pytest.mark.parametrize("mode", AVERAGES)
def test_averages(mode, loss):
    batch = responses([1.0, -1.0, 1.0], [[1.1], [0.9, 1.0, 1.1], []])
    value, gradient = loss_and_gradient(batch, loss, {}, {}, loss_agg_mode=mode)
    expected, (single, triple) = AVERAGES[mode]
    if loss == "reinforce":  # the gradient of -log_prob has no factor r
        assert gradient[0, 0].item() == pytest.approx(-single)
        assert gradient[1].tolist() == pytest.approx([triple] * 3)
        return
    negative = 0.0 if loss == "positive_only" else 1.0
    if loss == "positive_only":
        expected = -1.1 * single
    assert value == pytest.approx(expected, rel=2e-6)
    assert gradient[0].tolist() == pytest.approx([-1.1 * single, 0, 0], rel=2e-6)
    assert gradient[1].tolist() == pytest.approx(
        [negative * triple * r for r in (0.9, 1.0, 1.1)], rel=2e-6
    )
    assert not gradient[2].any()


def test_dr_grpo_divides_the_sum_by_the_longest_response_that_is_allowed():
    batch = responses([1.0, -1.0, 1.0], [[1.1], [0.9, 1.0, 1.1], []])
    value, _ = loss_and_gradient(batch, "grpo", {}, {"adv_estimator": "dr_grpo"})
    assert value == pytest.approx(AVERAGES["seq-mean-token-sum-norm"][0], rel=2e-6)


@pytest.mark.parametrize("loss", objective_names())
def test_a_rejected_response_stays_in_the_denominator(loss):
    """Two responses of which one is rejected: the other's gradient is that of a mini-batch of two."""
    advantages, ratios = [1.0, 1.0], [[1.0, 1.0], [1.0, 1.0]]
    _, both = loss_and_gradient(responses(advantages, ratios), loss, {}, {})
    batch = responses(advantages, ratios, [[math.exp(-0.3), 1.0], [1.0, 1.0]])
    _, one = loss_and_gradient(batch, loss, rejected("seq_sum_k1", bound=0.2), {})
    assert not one[0].any() and both[1].any()
    torch.testing.assert_close(one[1], both[1])
