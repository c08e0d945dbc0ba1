"""Rows of `test_config_reach*.py` for the objective and its corrections, the same in both backends."""

from __future__ import annotations

from typing import Any, get_args

from reach_rows import OPEN, Observe, Refused, Row, Table, each

from qarl.config.objectives import LossAggMode


def last(run: Any, name: str) -> Any:
    """A metric of the last step, or None. verl prefixes every metric of its actor, and QaRL takes that off again."""
    metrics = run.metrics[-1]
    return metrics.get(name, metrics.get(f"actor/{name}"))


def metric(name: str) -> Observe:
    """At the last step."""
    return lambda run: last(run, name)


def band(key: str, value: Any = 1e-9, **given: Any) -> Row:
    """A band that is open before and closed after: responses fall outside, and the gradient changes."""
    side = "neg" if key.startswith("neg") else "pos"
    observe = each(metric(f"actor/{side}_outside_band_frac"), metric("actor/grad_norm"))
    return Row(value, observe, lambda b, a: b[0] == 0 < a[0] and b[1] != a[1], OPEN | given)


GRAD = metric("actor/grad_norm")
CLIPPED = each(metric("actor/pg_clipfrac"), GRAD)
GRPO = {"actor.loss": "grpo", "actor.ppo_epochs": 2}
"""Ratios differ from 1 in all updates but the first."""
NOISE = {"noise": 0.1}
"""r_corr is about e^0.1 = 1.105 in one half of the responses, and e^-0.1 = 0.905 in the other."""
SECTION = "rollout_correction"
CAP = "actor.mis_imp_ratio_cap"
WEIGHT = GRPO | {f"{SECTION}.rollout_is": "token"}
BOUNDED = WEIGHT | {f"{SECTION}.rollout_is_threshold": 1.05}
CLIP = WEIGHT | {f"{SECTION}.rollout_is_mode": "clip"}


def rejecting(option: str, threshold: float, **more: Any) -> dict[str, Any]:
    keys = {"rollout_rs": [option], "rollout_rs_threshold": [threshold]} | more
    return {f"{SECTION}.{name}": value for name, value in keys.items()}


def other_gradient(before: float, after: float) -> bool:
    return before > 0 and abs(after / before - 1) > 1e-3


def weight(name: str) -> Observe:
    """A metric of the weights, to two digits: trainer and stand-in differ a little by themselves."""
    return lambda run: round(last(run, f"correction/weight_{name}"), 2)


def has(name: str) -> Observe:
    return lambda run: last(run, name) is not None


def rejected(run: Any) -> float:
    """The share of responses."""
    return float(last(run, "correction/rejected_response_frac") or 0.0)


_AVERAGES: list[Row | Refused] = [
    *(Row(mode, GRAD, other_gradient, GRPO) for mode in get_args(LossAggMode)[1:]),
    Refused("token-mean", "must be seq-mean-token-mean"),
]
_LEVELS: list[Row | Refused] = [
    Row("token", has("correction/weight_mean"), (False, True), GRPO),
    Row("sequence", weight("min"), lambda b, a: a < 0.8 < b, WEIGHT, NOISE),
    Row("geometric", weight("min"), lambda b, a: a > 0.88 > b, WEIGHT | {f"{SECTION}.rollout_is": "sequence"}, NOISE),
    Refused("token", "a second weight"),
]
OBJECTIVES: Table = {
    "actor.loss": [
        Row("grpo", each(has("actor/pg_clipfrac"), has("actor/inside_band_frac")), ([False, True], [True, False])),
        *(Row(loss, GRAD, other_gradient, GRPO) for loss in ("gspo", "mis_gspo", "positive_only", "sapo", "reinforce")),
        Row("dual_clip", GRAD, other_gradient, GRPO | {"actor.clip_ratio_c": 1.0001}),
    ],
    "actor.loss_agg_mode": _AVERAGES,
    "actor.clip_ratio_low": Row(1e-6, CLIPPED, lambda b, a: a[0] > b[0] and b[1] != a[1], GRPO),
    "actor.clip_ratio_high": Row(1e-6, CLIPPED, lambda b, a: a[0] > b[0] and b[1] != a[1], GRPO),
    "actor.clip_ratio_c": Row(
        1.0001, metric("actor/pg_clipfrac_lower"), lambda b, a: b < a, GRPO | {"actor.loss": "dual_clip"}
    ),
    "actor.tau_pos": Row(3.0, GRAD, other_gradient, GRPO | {"actor.loss": "sapo"}),
    "actor.tau_neg": Row(3.0, GRAD, other_gradient, GRPO | {"actor.loss": "sapo"}),
    "actor.mis_imp_ratio_cap": Row(
        1.05, weight("zero_frac"), lambda b, a: b == 0 < a < 1, {"actor.loss": "mis_gspo", CAP: 10.0}, NOISE
    ),
    "algorithm.adv_estimator": [
        Row("rloo", GRAD, other_gradient, GRPO),
        Row("dr_grpo", GRAD, other_gradient, GRPO | {"algorithm.norm_adv_by_std_in_grpo": False}),
    ],
    f"{SECTION}.bypass_mode": Row(
        True,
        metric("actor/seq_ratio_abs_dev_max"),
        lambda b, a: b < 1e-3 and 0.08 < a < 0.13,
        GRPO | {"optim.lr": 0.0},
        NOISE,
    ),
    f"{SECTION}.rollout_is": _LEVELS,
    f"{SECTION}.rollout_is_mode": [
        Row(
            "clip",
            each(weight("min"), weight("max")),
            lambda b, a: b[0] < 0.93 < a[0] == 0.95 and a[1] == 1.05,
            BOUNDED,
            NOISE,
        ),
        Row("mask", weight("zero_frac"), lambda b, a: b == 0 and 0.3 < a < 0.7, BOUNDED, NOISE),
        # Without any weight above 0, verl's own metrics divide by 0.
        Row(
            "icepop",
            weight("zero_frac"),
            lambda b, a: b == 0 and 0.3 < a < 0.7,
            BOUNDED,
            NOISE,
            also={f"{SECTION}.rollout_is_threshold_lower": 0.5},
        ),
    ],
    f"{SECTION}.rollout_is_threshold": Row(1.05, weight("max"), lambda b, a: b > 1.08 and a == 1.05, WEIGHT, NOISE),
    f"{SECTION}.rollout_is_threshold_lower": Row(0.95, weight("min"), lambda b, a: b < 0.93 and a == 0.95, CLIP, NOISE),
    f"{SECTION}.rollout_is_batch_normalize": Row(
        True, metric("correction/weight_mean"), lambda b, a: abs(b - 1) > 1e-4 > abs(a - 1), BOUNDED, NOISE
    ),
    f"{SECTION}.rollout_rs": [
        Row(["seq_mean_k1"], rejected, (0.0, 0.5), given, NOISE, also=rejecting("seq_mean_k1", 0.05))
        for given in (GRPO, {})
    ],
    f"{SECTION}.rollout_rs_threshold": Row([0.5], rejected, (0.5, 0.0), GRPO | rejecting("seq_mean_k1", 0.05), NOISE),
    f"{SECTION}.rollout_rs_threshold_lower": Row(
        -0.05, rejected, (0.5, 1.0), GRPO | rejecting("seq_mean_k1", 0.05), NOISE
    ),
    f"{SECTION}.rollout_rs_ratio": Row("ppo", rejected, lambda b, a: b == 0 < a, GRPO | rejecting("seq_mean_k2", 2e-3)),
    f"{SECTION}.veto_threshold": Row(0.9, rejected, (0.0, 1.0)),
}
