"""Find keys of the objective and its corrections that contradict each other. `qarl.config.checks` runs these checks.

If a different key is invalid, these checks get raw values. Then a key that should be a list may be a single value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qarl.config.errors import Problem
from qarl.config.objectives import DEFAULT_WEIGHT_BOUND

SEQUENCE_LOSSES = ("tbpo", "gspo", "mis_gspo")
"""Losses with one ratio per response, the geometric mean over its tokens."""
_AVERAGED = (*SEQUENCE_LOSSES, "sapo")
_CORRECTION = "rollout_correction"


def averages_over_responses(loss: str, mode: str) -> Problem | None:
    if loss not in _AVERAGED or mode == "seq-mean-token-mean":
        return None
    why = "has one ratio per response" if loss in SEQUENCE_LOSSES else "is defined with this mean"
    reason = f"with actor.loss={loss} it must be seq-mean-token-mean, because {loss} {why}"
    return Problem("actor.loss_agg_mode", mode, reason, "set it to seq-mean-token-mean, or choose another actor.loss")


def dr_grpo_does_not_normalise(estimator: str, loss: str, mode: str) -> Problem | None:
    key = "algorithm.adv_estimator"
    if estimator == "dr_grpo" and loss in _AVERAGED:
        reason = f"dr_grpo does not average over the tokens of a response, but actor.loss={loss} does"
        fix = "set actor.loss=grpo; or, to change only the advantages, set algorithm.norm_adv_by_std_in_grpo=false"
        return Problem(key, estimator, reason, fix)
    if estimator == "dr_grpo" and mode not in ("seq-mean-token-mean", "seq-mean-token-sum-norm"):
        reason = "with algorithm.adv_estimator=dr_grpo, token losses are summed and divided by a constant"
        return Problem("actor.loss_agg_mode", mode, reason, "remove it, or set it to seq-mean-token-sum-norm")
    if estimator != "grpo" and loss == "reinforce":
        reason = "the advantages of actor.loss=reinforce are always rewards whitened over the batch"
        return Problem(key, estimator, reason, "remove it, or choose another actor.loss")
    return None


def a_group_to_normalise(estimator: str, loss: str, by_std: bool) -> Problem | None:
    if by_std or (estimator in ("grpo", "dr_grpo") and loss != "reinforce"):
        return None
    cause = "actor.loss=reinforce" if loss == "reinforce" else f"algorithm.adv_estimator={estimator}"
    key, reason = "algorithm.norm_adv_by_std_in_grpo", f"it has no effect with {cause}, which has its own advantages"
    return Problem(key, by_std, reason, "remove it, or set algorithm.adv_estimator=grpo and another actor.loss")


def one_weight_for_the_mismatch(loss: str, level: str | None, bypass: bool) -> Problem | None:
    weighted = {"tbpo": "actor.seq_tis_imp_ratio_cap caps it", "mis_gspo": "actor.mis_imp_ratio_cap caps it"}
    if loss in weighted and level is not None:
        reason = f"actor.loss={loss} already weights each response by the mismatch, and this would be a second weight"
        return Problem(f"{_CORRECTION}.rollout_is", level, reason, f"set it to null; {weighted[loss]}")
    if bypass and loss in weighted:
        reason = f"actor.loss={loss} already weights each response by the mismatch, and the ratio would contain it too"
    elif bypass and loss == "reinforce":
        reason = "actor.loss=reinforce has no ratio"
    elif bypass and level is not None:
        reason = f"the ratio to the rollout contains the mismatch, and rollout_is={level} would apply it a second time"
    else:
        return None
    return Problem(f"{_CORRECTION}.bypass_mode", bypass, reason, "set it to false")


def rollouts_log_probs_hide_the_mismatch(source: str, loss: str) -> Problem | None:
    if source != "rollout" or loss not in ("tbpo", "mis_gspo"):
        return None
    reason = f"actor.loss={loss} weights each response by the mismatch, and that weight would always be 1"
    return Problem("actor.old_log_probs", source, reason, "set it to auto or recompute, or choose another actor.loss")


def tbpo_takes_whole_responses(loss: str, options: list[str] | str) -> Problem | None:
    tokens = [option for option in _items(options) if option.startswith("token_")]
    if loss not in SEQUENCE_LOSSES or not tokens:
        return None
    reason = f"actor.loss={loss} has one ratio per response, and single tokens cannot be removed from this ratio"
    return Problem(f"{_CORRECTION}.rollout_rs", options, reason, "choose a rejection of whole responses: seq_*")


def a_threshold_for_each_rejection(
    options: list[str] | str, ratio: str, upper: list[float] | float, lower: float | None
) -> Problem | None:
    key, options, upper = f"{_CORRECTION}.rollout_rs_threshold", _items(options), _items(upper)
    if len(set(options)) < len(options):
        return Problem(f"{_CORRECTION}.rollout_rs", options, "an entry is listed twice", "list each entry once")
    if not options and ratio != "corr":
        reason = "it has no effect, because rollout_rs is empty"
        return Problem(f"{_CORRECTION}.rollout_rs_ratio", ratio, reason, "set it to corr, or set rollout_rs")
    if options and len(upper) not in (1, len(options)):
        reason = f"rollout_rs has {len(options)} entries ({', '.join(options)})"
        return Problem(key, upper, reason, "give one threshold for each entry, or one for all entries")
    if not options and upper:
        return Problem(key, upper, "it has no effect, because rollout_rs is empty", "remove it, or set rollout_rs")
    if lower is None:
        return None
    pairs = zip(options, upper * (len(options) if len(upper) == 1 else 1), strict=True)
    bounds = [bound for option, bound in pairs if option.endswith("k1")]
    if not bounds:
        return Problem(f"{key}_lower", lower, "only k1 has a lower threshold", "set it to null")
    if lower >= min(bounds):
        return Problem(f"{key}_lower", lower, f"it is not below the upper one, {min(bounds)}", "choose a smaller value")
    return None


def bounds_of_a_weight(level: str | None, mode: str, upper: float, lower: float | None) -> Problem | None:
    key = f"{_CORRECTION}.rollout_is_threshold"
    both = mode in ("clip", "icepop")
    if lower is not None and not both:
        reason = f"rollout_is_mode={mode} has only an upper bound"
        return Problem(f"{key}_lower", lower, reason, "set it to null, or set rollout_is_mode to clip or icepop")
    if both and (1 / upper if lower is None else lower) >= upper:
        reason = (
            f"the lower bound of a weight is {1 / upper if lower is None else lower:g}, which is not below {upper:g}"
        )
        return Problem(key, upper, reason, "choose a larger value, or a smaller rollout_is_threshold_lower")
    unused = "it has no effect, because rollout_is is null"
    if level is None and mode != "truncate":
        return Problem(f"{_CORRECTION}.rollout_is_mode", mode, unused, "set rollout_is, or leave it at truncate")
    if level is None and upper != DEFAULT_WEIGHT_BOUND:
        return Problem(key, upper, unused, f"set rollout_is, or leave it at {DEFAULT_WEIGHT_BOUND:g}")
    return None


def weights_to_normalise(backend: str, level: str | None, mode: str, normalise: bool) -> Problem | None:
    key = f"{_CORRECTION}.rollout_is_batch_normalize"
    if normalise and level is None:
        return Problem(
            key, normalise, "it has no effect, because rollout_is is null", "set it to false, or set rollout_is"
        )
    if normalise and backend == "verl" and (level == "geometric" or mode == "clip"):
        reason = f"verl has no weight with rollout_is={level} and rollout_is_mode={mode}, and only verl's trainer sees "
        reason += "the whole batch"
        return Problem(key, normalise, reason, "set it to false, or set backend=local")
    return None


def old_log_probs_that_show_a_mismatch(
    source: str, level: str | None, options: list[str] | str, ratio: str, veto: float | None, bypass: bool
) -> Problem | None:
    if source == "rollout" and bypass:
        reason = "it has no effect, because the old log-probs are the rollout's"
        return Problem(f"{_CORRECTION}.bypass_mode", bypass, reason, "set it to false, or remove actor.old_log_probs")
    if source == "rollout" and veto is not None:
        reason = "the old log-probs are the rollout's, so it cannot see a token that the trainer finds impossible"
        fix = "set it to null, or set actor.old_log_probs to recompute or auto"
        return Problem(f"{_CORRECTION}.veto_threshold", veto, reason, fix)
    if source != "rollout" or (level is None and not (_items(options) and ratio == "corr")):
        return None
    reason = "it has no effect, because the old log-probs are the rollout's, so r_corr is always 1"
    key = f"{_CORRECTION}.rollout_rs" if level is None else f"{_CORRECTION}.rollout_is"
    fix = "remove it, or set actor.old_log_probs to recompute or auto"
    return Problem(key, options if level is None else level, reason, fix)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Problem | None]], ...] = (
    (("actor.loss", "actor.loss_agg_mode"), averages_over_responses),
    (("algorithm.adv_estimator", "actor.loss", "actor.loss_agg_mode"), dr_grpo_does_not_normalise),
    (("algorithm.adv_estimator", "actor.loss", "algorithm.norm_adv_by_std_in_grpo"), a_group_to_normalise),
    (("actor.loss", f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.bypass_mode"), one_weight_for_the_mismatch),
    (("actor.loss", f"{_CORRECTION}.rollout_rs"), tbpo_takes_whole_responses),
    (("actor.old_log_probs", "actor.loss"), rollouts_log_probs_hide_the_mismatch),
    (
        (
            "actor.old_log_probs",
            f"{_CORRECTION}.rollout_is",
            f"{_CORRECTION}.rollout_rs",
            f"{_CORRECTION}.rollout_rs_ratio",
            f"{_CORRECTION}.veto_threshold",
            f"{_CORRECTION}.bypass_mode",
        ),
        old_log_probs_that_show_a_mismatch,
    ),
    (
        (
            f"{_CORRECTION}.rollout_rs",
            f"{_CORRECTION}.rollout_rs_ratio",
            f"{_CORRECTION}.rollout_rs_threshold",
            f"{_CORRECTION}.rollout_rs_threshold_lower",
        ),
        a_threshold_for_each_rejection,
    ),
    (
        (
            f"{_CORRECTION}.rollout_is",
            f"{_CORRECTION}.rollout_is_mode",
            f"{_CORRECTION}.rollout_is_threshold",
            f"{_CORRECTION}.rollout_is_threshold_lower",
        ),
        bounds_of_a_weight,
    ),
    (
        (
            "backend",
            f"{_CORRECTION}.rollout_is",
            f"{_CORRECTION}.rollout_is_mode",
            f"{_CORRECTION}.rollout_is_batch_normalize",
        ),
        weights_to_normalise,
    ),
)
"""Pairs of keys and a check. The check takes the values of these keys."""
