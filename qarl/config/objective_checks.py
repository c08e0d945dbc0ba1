"""Find keys of the objective and its corrections that contradict each other. `qarl.config.checks` runs these checks.

If a different key is invalid, these checks get raw values. Then a key that should be a list may be a single value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qarl.config.errors import Problem
from qarl.config.objectives import DEFAULT_WEIGHT_BOUND

Values = Mapping[str, Any]
Problems = Iterator[Problem]
SEQUENCE_LOSSES = ("tbpo", "gspo", "mis_gspo")
"""Losses with one ratio per response, the geometric mean over its tokens."""
_AVERAGED = (*SEQUENCE_LOSSES, "sapo")
_CORRECTION = "rollout_correction"
_BYPASS, _IS, _RS = (f"{_CORRECTION}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs"))
_WITHOUT_WEIGHT = "it has no effect, because rollout_is is null"


def bad(v: Values, key: str, reason: str, fix: str) -> Problem:
    """Return the problem that the value of `key` has."""
    return Problem(key, v[key], reason, fix)


def averages_over_responses(v: Values) -> Problems:
    key, loss = "actor.loss_agg_mode", v["actor.loss"]
    if loss in _AVERAGED and v[key] != "seq-mean-token-mean":
        why = "has one ratio per response" if loss in SEQUENCE_LOSSES else "is defined with this mean"
        reason = f"with actor.loss={loss} it must be seq-mean-token-mean, because {loss} {why}"
        yield bad(v, key, reason, "set it to seq-mean-token-mean, or choose another actor.loss")


def advantages_suit_the_loss(v: Values) -> Problems:
    key, loss = "algorithm.adv_estimator", v["actor.loss"]
    mode = v["actor.loss_agg_mode"]
    if v[key] == "dr_grpo" and loss in _AVERAGED:
        reason = f"dr_grpo does not average over the tokens of a response, but actor.loss={loss} does"
        fix = "set actor.loss=grpo; or, to change only the advantages, set algorithm.norm_adv_by_std_in_grpo=false"
        yield bad(v, key, reason, fix)
    elif v[key] == "dr_grpo" and mode not in ("seq-mean-token-mean", "seq-mean-token-sum-norm"):
        reason = "with algorithm.adv_estimator=dr_grpo, token losses are summed and divided by a constant"
        yield bad(v, "actor.loss_agg_mode", reason, "remove it, or set it to seq-mean-token-sum-norm")
    elif v[key] != "grpo" and loss == "reinforce":
        reason = "the advantages of actor.loss=reinforce are always rewards whitened over the batch"
        yield bad(v, key, reason, "remove it, or choose another actor.loss")


def a_group_to_normalise(v: Values) -> Problems:
    key, loss, estimator = "algorithm.norm_adv_by_std_in_grpo", v["actor.loss"], v["algorithm.adv_estimator"]
    if not v[key] and (estimator not in ("grpo", "dr_grpo") or loss == "reinforce"):
        cause = "actor.loss=reinforce" if loss == "reinforce" else f"algorithm.adv_estimator={estimator}"
        reason = f"it has no effect with {cause}, which has its own advantages"
        yield bad(v, key, reason, "remove it, or set algorithm.adv_estimator=grpo and another actor.loss")


def one_weight_for_the_mismatch(v: Values) -> Problems:
    loss, level = v["actor.loss"], v[_IS]
    weighted = {"tbpo": "actor.seq_tis_imp_ratio_cap caps it", "mis_gspo": "actor.mis_imp_ratio_cap caps it"}
    if loss in weighted and level is not None:
        reason = f"actor.loss={loss} already weights each response by the mismatch, and this would be a second weight"
        yield bad(v, _IS, reason, f"set it to null; {weighted[loss]}")
    elif v[_BYPASS] and (loss in weighted or loss == "reinforce" or level is not None):
        reason = f"the ratio to the rollout contains the mismatch, and rollout_is={level} would apply it a second time"
        if loss in weighted:
            reason = f"actor.loss={loss} already weights each response by the mismatch, and the ratio would contain it "
            reason += "too"
        elif loss == "reinforce":
            reason = "actor.loss=reinforce has no ratio"
        yield bad(v, _BYPASS, reason, "set it to false")


def rollouts_log_probs_hide_the_mismatch(v: Values) -> Problems:
    key, loss = "actor.old_log_probs", v["actor.loss"]
    if v[key] == "rollout" and loss in ("tbpo", "mis_gspo"):
        reason = f"actor.loss={loss} weights each response by the mismatch, and that weight would always be 1"
        yield bad(v, key, reason, "set it to auto or recompute, or choose another actor.loss")


def rejections_are_of_whole_responses(v: Values) -> Problems:
    loss = v["actor.loss"]
    if loss in SEQUENCE_LOSSES and any(option.startswith("token_") for option in _items(v[_RS])):
        reason = f"actor.loss={loss} has one ratio per response, and single tokens cannot be removed from this ratio"
        yield bad(v, _RS, reason, "choose a rejection of whole responses: seq_*")


def a_threshold_for_each_rejection(v: Values) -> Problems:
    key, ratio = f"{_RS}_threshold", f"{_RS}_ratio"
    options, upper, lower = _items(v[_RS]), _items(v[key]), v[f"{key}_lower"]
    if len(set(options)) < len(options):
        yield bad(v, _RS, "an entry is listed twice", "list each entry once")
    elif not options and v[ratio] != "corr":
        reason = "it has no effect, because rollout_rs is empty"
        yield bad(v, ratio, reason, "set it to corr, or set rollout_rs")
    elif options and len(upper) not in (1, len(options)):
        reason = f"rollout_rs has {len(options)} entries ({', '.join(options)})"
        yield Problem(key, upper, reason, "give one threshold for each entry, or one for all entries")
    elif not options and upper:
        reason = "it has no effect, because rollout_rs is empty"
        yield Problem(key, upper, reason, "remove it, or set rollout_rs")
    elif lower is not None:
        pairs = zip(options, upper * (len(options) if len(upper) == 1 else 1), strict=True)
        bounds = [bound for option, bound in pairs if option.endswith("k1")]
        if not bounds:
            yield bad(v, f"{key}_lower", "only k1 has a lower threshold", "set it to null")
        elif lower >= min(bounds):
            yield bad(v, f"{key}_lower", f"it is not below the upper one, {min(bounds)}", "choose a smaller value")


def bounds_of_a_weight(v: Values) -> Problems:
    key, mode = f"{_IS}_threshold", v[f"{_IS}_mode"]
    upper, lower = v[key], v[f"{_IS}_threshold_lower"]
    both = mode in ("clip", "icepop")
    lowest = 1 / upper if lower is None else lower
    if lower is not None and not both:
        reason = f"rollout_is_mode={mode} has only an upper bound"
        yield bad(v, f"{key}_lower", reason, "set it to null, or set rollout_is_mode to clip or icepop")
    elif both and lowest >= upper:
        reason = f"the lower bound of a weight is {lowest:g}, which is not below {upper:g}"
        yield bad(v, key, reason, "choose a larger value, or a smaller rollout_is_threshold_lower")
    elif v[_IS] is None and mode != "truncate":
        yield bad(v, f"{_IS}_mode", _WITHOUT_WEIGHT, "set rollout_is, or leave it at truncate")
    elif v[_IS] is None and upper != DEFAULT_WEIGHT_BOUND:
        yield bad(v, key, _WITHOUT_WEIGHT, f"set rollout_is, or leave it at {DEFAULT_WEIGHT_BOUND:g}")


def weights_to_normalise(v: Values) -> Problems:
    key, level, mode = f"{_IS}_batch_normalize", v[_IS], v[f"{_IS}_mode"]
    if v[key] and level is None:
        yield bad(v, key, _WITHOUT_WEIGHT, "set it to false, or set rollout_is")
    elif v[key] and v["backend"] == "verl" and (level == "geometric" or mode == "clip"):
        reason = f"verl has no weight with rollout_is={level} and rollout_is_mode={mode}, and only verl's trainer sees "
        yield bad(v, key, reason + "the whole batch", "set it to false, or set backend=local")


def old_log_probs_that_show_a_mismatch(v: Values) -> Problems:
    if v["actor.old_log_probs"] != "rollout":
        return
    veto = f"{_CORRECTION}.veto_threshold"
    if v[_BYPASS]:
        reason = "it has no effect, because the old log-probs are the rollout's"
        yield bad(v, _BYPASS, reason, "set it to false, or remove actor.old_log_probs")
    elif v[veto] is not None:
        reason = "the old log-probs are the rollout's, so it cannot see a token that the trainer finds impossible"
        yield bad(v, veto, reason, "set it to null, or set actor.old_log_probs to recompute or auto")
    elif v[_IS] is not None or (_items(v[_RS]) and v[f"{_RS}_ratio"] == "corr"):
        reason = "it has no effect, because the old log-probs are the rollout's, so r_corr is always 1"
        key = _RS if v[_IS] is None else _IS
        yield bad(v, key, reason, "remove it, or set actor.old_log_probs to recompute or auto")


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


CHECKS = (
    averages_over_responses,
    advantages_suit_the_loss,
    a_group_to_normalise,
    one_weight_for_the_mismatch,
    rejections_are_of_whole_responses,
    rollouts_log_probs_hide_the_mismatch,
    old_log_probs_that_show_a_mismatch,
    a_threshold_for_each_rejection,
    bounds_of_a_weight,
    weights_to_normalise,
)
