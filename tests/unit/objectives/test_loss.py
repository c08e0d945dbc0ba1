"""What an objective hands to verl's function, and the weights, bounds and vetoes that are QaRL's, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objective_cases import rejected, run_config, weighted

from qarl.objectives import verl_functions
from qarl.objectives.loss import accepted_tokens, correction_weights, objective_loss
from qarl.objectives.settings import NO_DUAL_CLIP, objective_settings
from qarl.objectives.verl_functions import rejection_bounds, weight_bounds

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
NAN = math.nan
LOG_PROB = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, NAN, NAN], [NAN, NAN, NAN]])
OLD = torch.tensor([[-1.5, -2.5, -3.5], [-4.5, NAN, NAN], [NAN, NAN, NAN]])
ROLLOUT = torch.tensor([[-1.25, -2.25, -3.25], [-4.25, NAN, NAN], [NAN, NAN, NAN]])
ADVANTAGES = torch.tensor([2.0, -3.0, 5.0])
VERL_NAMES = {
    "grpo": "vanilla",
    "dual_clip": "vanilla",
    "positive_only": "vanilla",
    "gspo": "gspo",
    "mis_gspo": "gspo",
    "sapo": "sapo",
    "reinforce": "reinforce",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of verl's losses; the loss is the sum of log_prob."""
    recorded: list[dict[str, Any]] = []

    def policy_loss(
        name: str, settings: Any, **arguments: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        recorded.append({"name": name, **arguments})
        return arguments["log_prob"].sum(), {}

    monkeypatch.setattr(verl_functions, "policy_loss", policy_loss)
    return recorded


def call(loss: str, correction: dict[str, Any] | None = None, **changed: Any) -> torch.Tensor:
    settings = objective_settings(run_config(loss, correction or {}))
    tensors = {
        "log_prob": LOG_PROB.clone().requires_grad_(),
        "old_log_prob": OLD.clone().requires_grad_(),
        "rollout_log_prob": ROLLOUT.clone().requires_grad_(),
        "advantages": ADVANTAGES,
        "response_mask": MASK,
    }
    arguments = {**tensors, "responses": 7, "tokens": 31, **changed}
    value, _ = objective_loss(**arguments, settings=settings)
    value.backward()
    assert arguments["old_log_prob"].grad is None and arguments["rollout_log_prob"].grad is None
    gradient = arguments["log_prob"].grad
    assert gradient is not None
    return gradient


def masked(values: torch.Tensor) -> list[list[float]]:
    return torch.where(MASK, values, 0.0).tolist()


@pytest.mark.parametrize("loss", [loss for loss in VERL_NAMES if loss != "mis_gspo"])
def test_verls_function_gets_the_tokens_and_zeros_elsewhere(calls, loss):
    gradient = call(loss)
    (arguments,) = calls
    assert arguments["name"] == VERL_NAMES[loss]
    assert arguments["log_prob"].tolist() == masked(LOG_PROB)
    reference = "rollout_log_prob" if loss == "reinforce" else "old_log_prob"
    assert arguments[reference].tolist() == masked(OLD)
    assert ("old_log_prob" in arguments) == (loss != "reinforce")
    negative = 0.0 if loss == "positive_only" else -3.0
    assert arguments["advantages"].tolist() == [[2.0] * 3, [negative, 0.0, 0.0], [0.0] * 3]
    assert torch.equal(arguments["response_mask"], MASK)
    assert (arguments["responses"], arguments["tokens"]) == (7, 31), (
        "the denominators are the whole mini-batch's"
    )
    assert arguments["rollout_is_weights"] is None
    assert torch.equal(gradient, MASK.float())


def test_log_probs_in_bf16_reach_verl_in_fp32_and_advantages_may_have_two_dimensions(calls):
    per_token = ADVANTAGES[:, None].expand(3, 3).masked_fill(~MASK, NAN)
    call("grpo", log_prob=LOG_PROB.bfloat16().requires_grad_(), advantages=per_token)
    assert calls[0]["log_prob"].dtype == calls[0]["advantages"].dtype == torch.float32
    assert calls[0]["advantages"].tolist() == [[2.0] * 3, [-3.0, 0.0, 0.0], [0.0] * 3]


def test_bypass_replaces_the_old_log_probs(calls):
    call("grpo", {"bypass_mode": True})
    assert calls[0]["old_log_prob"].tolist() == masked(ROLLOUT)


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.01, [True, True]), (0.02, [True, False]), (0.04, [False, False])]
)
def test_the_veto_takes_whole_responses_out_of_the_mask(calls, threshold, kept):
    """Response 0 has an old probability of e^-3.5 = 0.030, response 1 one of e^-4.5 = 0.011.

    The new ones, e^-3 = 0.050 and e^-4 = 0.018, would be judged otherwise."""
    call("grpo", {"veto_threshold": threshold})
    arguments = calls[0]
    expected = MASK & torch.tensor([*kept, True])[:, None]
    assert torch.equal(arguments["response_mask"], expected)
    for name in ("log_prob", "advantages"):
        assert not arguments[name][~expected].any(), name
    assert (arguments["responses"], arguments["tokens"]) == (7, 31), "they stay in the denominator"


@pytest.mark.parametrize(("ratio", "expected"), [("corr", -0.25), ("ppo", 0.25)])
def test_a_rejection_sees_the_ratio_that_was_chosen(calls, monkeypatch, ratio, expected):
    """Old minus rollout log-probs are -0.25, and new minus rollout ones 0.25."""
    judged = []

    def rejection_mask(
        log_ratio: torch.Tensor, mask: torch.Tensor, correction: Any
    ) -> torch.Tensor:
        judged.append(log_ratio)
        return mask & torch.tensor([[True, False, True]])

    monkeypatch.setattr(verl_functions, "rejection_mask", rejection_mask)
    call("grpo", rejected("token_k3", bound=0.1, rollout_rs_ratio=ratio))
    assert judged[0].tolist() == torch.where(MASK, expected, 0.0).tolist()
    assert calls[0]["response_mask"].tolist() == [
        [True, False, True],
        [True, False, False],
        [False] * 3,
    ]
    assert calls[0]["log_prob"].tolist() == [[-1.0, 0.0, -3.0], [-4.0, 0.0, 0.0], [0.0] * 3]


def test_mis_gspo_weights_by_the_product_and_masks_above_its_cap(calls, monkeypatch):
    asked = []

    def weights(log_ratio: torch.Tensor, mask: torch.Tensor, correction: Any) -> torch.Tensor:
        asked.append((log_ratio, correction))
        return mask * 0.5

    monkeypatch.setattr(verl_functions, "correction_weights", weights)
    call("mis_gspo")
    log_ratio, correction = asked[0]
    assert log_ratio.tolist() == torch.where(MASK, -0.25, 0.0).tolist()
    assert (correction.rollout_is, correction.rollout_is_mode) == ("sequence", "mask")
    assert correction.rollout_is_threshold == 2.0  # actor.mis_imp_ratio_cap
    assert calls[0]["name"] == "gspo" and torch.equal(calls[0]["rollout_is_weights"], MASK * 0.5)


def test_tbpo_divides_by_the_whole_mini_batch_and_sees_what_is_accepted():
    """r = e^0.5 is above both bands, w = e^-0.25: -w 1.0004 * 2 and w 1.0007 * 3. A veto takes the second out."""
    settings = objective_settings(run_config("tbpo", {"veto_threshold": 0.001}))
    loss, _ = objective_loss(
        LOG_PROB, OLD, ROLLOUT, ADVANTAGES, MASK, settings, responses=7, tokens=31
    )
    positive, negative = -math.exp(-0.25) * 1.0004 * 2, math.exp(-0.25) * 1.0007 * 3
    assert loss.item() == pytest.approx((positive + negative) / 7, rel=2e-6)
    vetoed = objective_settings(run_config("tbpo", {"veto_threshold": 0.02}))
    loss, _ = objective_loss(
        LOG_PROB, OLD, ROLLOUT, ADVANTAGES, MASK, vetoed, responses=7, tokens=31
    )
    assert loss.item() == pytest.approx(positive / 7, rel=2e-6)


def test_given_weights_are_used_and_others_are_computed(calls):
    correction = weighted("geometric", rollout_is_threshold=4.0)
    call("grpo", correction, weight=torch.full((3, 3), 0.25))
    call("grpo", correction)
    given, computed = (arguments["rollout_is_weights"] for arguments in calls)
    assert given.tolist() == [[0.25] * 3] * 3
    # Every token's r_corr is e^-0.25, and so is their geometric mean.
    expected = torch.where(MASK, math.exp(-0.25), 0.0)
    torch.testing.assert_close(computed, expected)


def mismatch(*rows: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Old log-probs, the rollout's, and the mask, of responses with these r_corr."""
    width = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    log_r = torch.tensor([row + [NAN] * (width - len(row)) for row in rows]).log()
    old = torch.full(log_r.shape, -1.0)
    return old, old - log_r, mask


# r_corr of two responses -> the weight of their tokens. The geometric means are (2 * 8)^(1/2) = 4 and 1/2.
OWN_WEIGHTS: list[tuple[dict[str, Any], list[float]]] = [
    (weighted("geometric", rollout_is_threshold=5.0), [4.0, 0.5]),
    (weighted("geometric"), [2.0, 0.5]),
    (weighted("geometric", "clip"), [2.0, 0.5]),
    (weighted("geometric", "clip", rollout_is_threshold=1.25), [1.25, 0.8]),
    (
        weighted("geometric", "clip", rollout_is_threshold=3.0, rollout_is_threshold_lower=0.75),
        [3.0, 0.75],
    ),
    (weighted("geometric", "mask"), [0.0, 0.5]),
    (weighted("geometric", "mask", rollout_is_threshold=5.0), [4.0, 0.5]),
    (weighted("geometric", "icepop", rollout_is_threshold=5.0), [4.0, 0.5]),
    (weighted("geometric", "icepop", rollout_is_threshold=1.5), [0.0, 0.0]),
    (
        weighted("geometric", "icepop", rollout_is_threshold=5.0, rollout_is_threshold_lower=0.6),
        [4.0, 0.0],
    ),
    # The products 16 and 1/2.
    (weighted("sequence", "clip", rollout_is_threshold=20.0), [16.0, 0.5]),
    (weighted("sequence", "clip", rollout_is_threshold=1.25), [1.25, 0.8]),
    # Divided by the mean over responses, (3 + 1/2) / 2 = 7/4, with the bounds applied first.
    (
        weighted("geometric", rollout_is_threshold=3.0, rollout_is_batch_normalize=True),
        [12 / 7, 2 / 7],
    ),
]


@pytest.mark.parametrize(("correction", "expected"), OWN_WEIGHTS, ids=str)
def test_weights_that_verl_lacks(correction, expected):
    old, rollout, mask = mismatch([2.0, 8.0], [0.5])
    settings = objective_settings(run_config("grpo", correction)).correction
    weight = correction_weights(old, rollout, mask, settings)
    assert weight is not None
    first, second = expected
    torch.testing.assert_close(
        weight, torch.tensor([[first, first], [second, 0.0]]), rtol=2e-6, atol=0
    )


def test_the_mean_of_token_weights_is_over_tokens():
    """Clipped to [1/2, 4] the weights are 2, 4 and 1/2: divided by 13/6, and not by the mean over responses."""
    old, rollout, mask = mismatch([2.0, 8.0], [0.5])
    correction = weighted("token", "clip", rollout_is_threshold=4.0, rollout_is_threshold_lower=0.5)
    correction["rollout_is_batch_normalize"] = True
    settings = objective_settings(run_config("grpo", correction)).correction
    expected = torch.tensor([[12 / 13, 24 / 13], [3 / 13, 0.0]])
    torch.testing.assert_close(
        correction_weights(old, rollout, mask, settings), expected, rtol=2e-6, atol=0
    )


def test_an_empty_response_does_not_count_in_the_mean_of_weights():
    """The geometric means 4 and 1/2, divided by their mean over the two responses that have a token."""
    old, rollout, mask = mismatch([2.0, 8.0], [0.5], [])
    correction = weighted("geometric", rollout_is_threshold=5.0, rollout_is_batch_normalize=True)
    settings = objective_settings(run_config("grpo", correction)).correction
    expected = torch.tensor([[16 / 9, 16 / 9], [2 / 9, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(
        correction_weights(old, rollout, mask, settings), expected, rtol=2e-6, atol=0
    )


def test_a_log_ratio_above_20_is_clipped_before_the_exponential():
    old, rollout, mask = mismatch([math.exp(30.0)], [math.exp(-30.0)])
    correction = weighted("geometric", "truncate", rollout_is_threshold=1e6)
    settings = objective_settings(run_config("grpo", correction)).correction
    weight = correction_weights(old, rollout, mask, settings)
    assert weight is not None
    assert weight.flatten().tolist() == pytest.approx([1e6, math.exp(-20)], rel=1e-6)


def test_without_a_weight_or_a_token_there_is_none():
    old, rollout, mask = mismatch([2.0, 8.0], [0.5])
    plain = objective_settings(run_config("grpo", {})).correction
    assert correction_weights(old, rollout, mask, plain) is None
    both = objective_settings(
        run_config("grpo", weighted("token") | rejected("seq_sum_k1", bound=0.1))
    ).correction
    empty = torch.zeros_like(mask)
    weight = correction_weights(old, rollout, empty, both)
    assert weight is not None and not weight.any()
    assert not accepted_tokens(old, old, rollout, empty, both).any()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (weighted("token"), 2.0),
        (weighted("sequence", rollout_is_threshold=3.5), 3.5),
        (weighted("token", "icepop"), "0.5_2.0"),
        (
            weighted("token", "icepop", rollout_is_threshold=4.0, rollout_is_threshold_lower=0.125),
            "0.125_4.0",
        ),
        (weighted("token", "mask"), "1e-30_2.0"),
    ],
    ids=str,
)
def test_bounds_of_weights_in_verls_notation(correction, expected):
    assert weight_bounds(objective_settings(run_config("grpo", correction)).correction) == expected


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (rejected("seq_sum_k3", bound=0.001), ["0.001"]),
        (rejected("seq_mean_k2", "seq_max_k3", bound=[0.1, 0.2]), ["0.1", "0.2"]),
        (rejected("seq_mean_k2", "seq_max_k3", bound=0.1), ["0.1", "0.1"]),
    ],
    ids=str,
)
def test_bounds_of_rejections_in_verls_notation(correction, expected):
    assert (
        rejection_bounds(objective_settings(run_config("grpo", correction)).correction).split(",")
        == expected
    )


@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_of_k1_are_ratios_in_verl(option):
    """verl compares exp(K1), so ln 2 nats are a ratio of 2."""
    correction = rejected(option, bound=math.log(2)) | {"rollout_rs_threshold_lower": -math.log(4)}
    settings = objective_settings(run_config("grpo", correction)).correction
    lower, upper = map(float, rejection_bounds(settings).split("_"))
    assert (lower, upper) == pytest.approx((0.25, 2.0))
    one_sided = settings.model_copy(update={"rollout_rs_threshold_lower": None})
    assert float(rejection_bounds(one_sided).split("_")[0]) < 1e-300


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        ("grpo", 0.2, 0.2),
        ("dual_clip", 0.2, 0.2),
        ("positive_only", 0.2, 0.2),
        ("gspo", 3e-4, 4e-4),
    ],
)
def test_clip_ratios_that_are_not_set_are_the_papers(loss, low, high):
    settings = objective_settings(run_config(loss, {}))
    assert (settings.clip_ratio_low, settings.clip_ratio_high) == (low, high)
    one = objective_settings(run_config(loss, {}, clip_ratio_low=0.05))
    assert (one.clip_ratio_low, one.clip_ratio_high) == (0.05, high)


def test_settings_of_the_averages():
    """data.max_response_length is 12. dr_grpo sums the tokens. No ratio reaches the bound that replaces dual clip."""
    settings = objective_settings(run_config("grpo", {}))
    assert (settings.loss_agg_mode, settings.loss_scale_factor) == ("seq-mean-token-mean", 12)
    summed = objective_settings(run_config("grpo", {}, {"adv_estimator": "dr_grpo"}))
    assert (summed.loss_agg_mode, summed.loss_scale_factor) == ("seq-mean-token-sum-norm", 12)
    assert math.exp(20) * 10 < NO_DUAL_CLIP


def test_the_bound_of_a_geometric_weight_is_that_of_the_mean() -> None:
    """100 tokens, each 0.5 nats off: the mean is 0.5, though the sum of 50 is above verl's bound of 20."""
    rollout = torch.full((1, 100), -1.5)
    mask = torch.ones(1, 100, dtype=torch.bool)
    geometric = {"rollout_is": "geometric", "rollout_is_threshold": 5.0}
    correction = objective_settings(run_config("grpo", geometric)).correction
    weight = correction_weights(rollout + 0.5, rollout, mask, correction)
    torch.testing.assert_close(weight, torch.full((1, 100), math.exp(0.5)))
