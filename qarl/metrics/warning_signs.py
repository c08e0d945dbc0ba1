"""Find warning signs of a collapse in the metrics of a run.

Before the reward of a collapsing run falls, other metrics often change. The QaRL paper (arXiv 2604.07853) names error
tokens and rising entropy. "When Speed Kills Stability" (2025) shows the trainer's perplexity and the gradient norm
exploding together. arXiv 2605.14220 names a difference between the loss contributions of positive and negative
samples. Jumps of entropy and gradient norm are well-known signs of a mismatch. `SignFinder` looks for these signs after
each step, and reports each sign once.

The rules are ours. Metrics of healthy runs are noisy, so the rules compare medians:

- recent: of the last few steps
- usual: of up to `WINDOW` steps before them
- early: of the first `EARLY` steps of the run

Most changes count only if they exceed both the limit of their rule (a factor or a difference) and several times the
usual spread. The spread is 1.4826 times the median absolute deviation, which equals the standard deviation of normally
distributed values. docs/lookup/results/warning_signs.md lists the runs on which we checked the rules.

This module needs no torch. A resumed run rebuilds the state from its metrics.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

RECENT = 3
"""Steps of a recent median."""
WINDOW = 30
"""Most steps of a usual median."""
FEWEST = 10
"""Fewest steps of a usual median."""
EARLY = 20
"""Steps of an early median."""
TREND = 10
"""Steps of the recent median in `trend`, which compares it with the early median."""
DEVIATIONS = 6.0
"""A change must exceed the usual spread this many times."""
JUMP_DEVIATIONS = 4.0
"""The same for a change of a logarithm."""
IDLE_STEPS = 5
"""Number of consecutive steps that teach nothing, after which this is reported: no rewards of a group differ, or every
response is left out of the loss."""
LARGE_UPDATE = 0.3
"""A size of updates, in nats, that is too large. The paper's widest band, 7e-4 at 16384 tokens (arXiv 2604.07853), is
0.09."""
LARGE_STEPS = 5
"""Steps of the median that is compared with `LARGE_UPDATE`."""
GROWN_UPDATE = 0.15
"""A size of updates, in nats, that is too large if it has doubled."""
LARGE_K3 = 4e-4
"""A k3, in nats per token, below which a mismatch counts as harmless. It is a choice: that of BF16 rollouts is 4e-5,
and the runs that collapsed because of it had 1e-2 or more."""

_EARLY_WORDS = f"in the first {EARLY} steps"

Point = tuple[int, float]
"""A training step and the value of a metric."""
Series = Mapping[str, Sequence[Point]]
Seen = tuple[int, str] | None
"""The first step that shows a sign, and what was seen. None: nothing."""
Rule = Callable[[Series], Seen]


@dataclass(frozen=True)
class WarningSign:
    """A sign of trouble.

    sign         its name
    step         the step after which it was reported
    since_step   the first step that shows it
    text         what was seen
    remedy       what to try
    """

    sign: str
    step: int
    since_step: int
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"warning sign {self.sign}, since step {self.since_step}: {self.text}\n  try: {self.remedy}"


class SignFinder:
    """Finds warning signs in a run's metrics, step by step."""

    def __init__(self) -> None:
        self._series: defaultdict[str, list[Point]] = defaultdict(list)
        self._reported: set[str] = set()

    def add(self, step: int, metrics: Mapping[str, Any]) -> list[WarningSign]:
        """Add the metrics of one training step. Return the signs that show now and have not been reported yet.

        Metrics that are missing or not finite are skipped. Steps must be given in order."""
        values = {**metrics, **_derived(metrics)}
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._series[name].append((step, float(value)))
        signs = []
        for sign, (rule, remedy) in SIGNS.items():
            if sign in self._reported:
                continue
            seen = rule(self._series)
            if seen:
                self._reported.add(sign)
                since, text = seen
                signs.append(WarningSign(sign, step, since, text, remedy))
        return signs


_CONTRIBUTIONS = ("actor/zero_centred_loss_pos", "actor/zero_centred_loss_neg")
_CONTRIBUTIONS_TO_ROLLOUT = (
    "actor/rollout_zero_centred_loss_pos",
    "actor/rollout_zero_centred_loss_neg",
)


def _derived(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics that only the rules use, as far as `metrics` has what they are made of.

    skew/net, skew/own   sums over the signs of the advantage of C(r_rollout) - C(r), and of |C(r)|, where r is a
                         token's ratio to the old policy and r_rollout that to the rollout policy
    actor/update_size    NaN if it is 0, or contains a mismatch of at least `LARGE_K3`, because the old log-probs are
                         the rollout's
    ratio/mismatched     actor/ratio_size if it contains such a mismatch: there, and with bypass_mode
    mismatch/*           NaN if they contain the staleness of responses, which grows with the updates and is no
                         trouble by itself
    """
    derived: dict[str, float] = {}
    if "staleness/age_mean" in metrics:
        derived |= {"mismatch/abs_p999": math.nan, "mismatch/k3": math.nan}
    with suppress(KeyError, TypeError):
        contributions = [metrics[name] for name in _CONTRIBUTIONS]
        to_rollout = [metrics[name] for name in _CONTRIBUTIONS_TO_ROLLOUT]
        net = sum(to_rollout) - sum(contributions)
        derived |= {"skew/net": net, "skew/own": sum(map(abs, contributions))}
    update = metrics.get("actor/update_size", math.nan)
    ratio = metrics.get("actor/ratio_size", math.nan)
    k3 = metrics.get("mismatch/k3")
    mismatched = isinstance(k3, float) and k3 >= LARGE_K3
    from_rollout = metrics.get("old_log_probs/from_rollout") == 1
    if (mismatched and from_rollout) or update == 0:
        derived["actor/update_size"] = math.nan
    if mismatched and (from_rollout or ratio != update):
        derived["ratio/mismatched"] = ratio
    return derived


class Medians(NamedTuple):
    """`recent`: median of the last values. `usual`, `spread`: median and spread of the values before them."""

    recent: float
    usual: float
    spread: float


def medians_of(values: Sequence[float], recent: int) -> Medians | None:
    """Compare the last `recent` values with those before them. Return None if there are too few values."""
    before = values[:-recent][-WINDOW:]
    if len(before) < FEWEST:
        return None
    return Medians(median(values[-recent:]), median(before), _spread(before))


def _values(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points]


def _spread(values: Sequence[float]) -> float:
    """Return the median absolute deviation, scaled to the standard deviation of normally distributed values."""
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the median of normally distributed values."""
    return 1.2533 * _spread(values) / math.sqrt(len(values))


def _since(points: Sequence[Point], shows: Callable[[float], bool]) -> int:
    """Return the first step of the latest run of values for which `shows` is true. A single exception is tolerated."""
    since = points[-1][0]
    missed = 0
    for step, value in reversed(points):
        if shows(value):
            since = step
            missed = 0
        else:
            missed += 1
            if missed > 1:
                break
    return since


def jumps(*rows: tuple[str, float], recent: int = RECENT) -> Rule:
    """Return a rule that looks for metrics whose recent median differs from the usual one by at least a factor.

    A factor below 1 is a fall. Logarithms are compared, so values of 0 or below are left out. The difference of the
    logarithms must also exceed `JUMP_DEVIATIONS` times the usual spread."""

    def rule(series: Series) -> Seen:
        for name, factor in rows:
            positive = [point for point in series[name] if point[1] > 0]
            logs = [(step, math.log(value)) for step, value in positive]
            medians = medians_of(_values(logs), recent)
            if medians is None:
                continue
            middle = medians.usual
            up = math.copysign(1, math.log(factor))
            far = abs(math.log(factor))
            if up * (medians.recent - middle) < max(far, JUMP_DEVIATIONS * medians.spread):
                continue
            excess = [(step, up * (value - middle) - far) for step, value in logs]
            since = _since(excess, lambda value: value >= 0)
            verb = "rose" if up > 0 else "fell"
            return since, _words(name, verb, math.exp(middle), math.exp(medians.recent))
        return None

    return rule


def together(*rules: Rule) -> Rule:
    """Return a rule that finds what all `rules` find in the same steps: since the latest of their first steps."""

    def rule(series: Series) -> Seen:
        found = [seen for seen in (rule(series) for rule in rules) if seen]
        if len(found) < len(rules):
            return None
        return max(since for since, _ in found), "; ".join(text for _, text in found)

    return rule


def trend(name: str, factor: float, *, least: float, deviations: float = DEVIATIONS) -> Rule:
    """Return a rule for a median of the last `TREND` values that is at least `least` and at least `factor` times the
    early median, if the rise exceeds `deviations` times the early spread."""

    def rule(series: Series) -> Seen:
        points = series[name]
        if len(points) < EARLY + TREND:
            return None
        early = _values(points[:EARLY])
        middle = max(median(early), least / factor)
        now = median(_values(points[-TREND:]))
        if now < factor * middle or now <= middle + deviations * _spread(early):
            return None
        since = _since(points, lambda value: value >= factor * middle)
        return since, _words(name, "grew", median(early), now, _EARLY_WORDS)

    return rule


def _large(name: str, points: Sequence[Point]) -> Seen:
    """Look for ratios that are further from 1 than any usual band lets them."""
    recent = _values(points[-LARGE_STEPS:])
    if len(recent) < LARGE_STEPS:
        return None
    now = median(recent)
    if now < LARGE_UPDATE:
        return None
    since = _since(points, lambda value: value >= LARGE_UPDATE)
    return since, f"{name} is {now:.2g} (median of {LARGE_STEPS} steps), at least {LARGE_UPDATE:g}"


def _ratio_mismatch(series: Series) -> Seen:
    seen = _large("actor/ratio_size", series["ratio/mismatched"])
    if seen is None:
        return None
    since, text = seen
    return since, f"the ratios of the loss contain the mismatch: {text}"


def _update_size(series: Series) -> Seen:
    """Look for updates that are large, or much larger than at first."""
    name = "actor/update_size"
    grown = trend(name, 2.0, least=GROWN_UPDATE, deviations=0.0)
    return _large(name, series[name]) or grown(series)


def _skew(series: Series) -> Seen:
    """Look for a net push of the mismatch: C(r_rollout) - C(r) summed over both signs, which noise leaves near 0."""
    points = series["skew/net"]
    if len(points) < 2 * EARLY:
        return None
    early = _values(points[:EARLY])
    recent = _values(points[-EARLY:])
    push = median(recent)
    before = abs(median(early))
    error = max(_error(early), _error(recent))
    floor = median(_values(series["skew/own"][-EARLY:]))
    if abs(push) < max(3 * before, DEVIATIONS * error) or abs(push) <= floor:
        return None

    def pushes(value: float) -> bool:
        return value * push > 0 and abs(value) >= abs(push) / 2

    since = _since(points, pushes)
    text = (
        "the mismatch pushes tokens of the two signs unequally: C(r_rollout) - C(r) summed over the signs is "
        f"{push:.2g} (median of {EARLY} steps), {before:.2g} in the first {EARLY}; |C(r)| alone is {floor:.2g}"
    )
    return since, text


def _repetition(series: Series) -> Seen:
    for name in ("error_tokens/repetitive_frac", "error_tokens/garbled_frac"):
        medians = medians_of(_values(series[name]), recent=5)
        if medians is None:
            continue
        limit = medians.usual + max(0.1, DEVIATIONS * medians.spread)
        if medians.recent > limit:
            since = _since(series[name], partial(operator.lt, limit))
            return since, _words(name, "rose", medians.usual, medians.recent)
    return None


def idle(name: str, what: str) -> Rule:
    """Return a rule that sees a share of 1 in each of the last `IDLE_STEPS` steps. `what`: what that means."""

    def rule(series: Series) -> Seen:
        recent = series[name][-IDLE_STEPS:]
        if len(recent) < IDLE_STEPS or min(_values(recent)) < 1:
            return None
        text = f"in {IDLE_STEPS} steps in a row {what}, so the run cannot learn, but the optimizer's momentum still"
        return recent[0][0], f"{text} moves the weights"

    return rule


def _words(name: str, verb: str, before: float, now: float, when: str = "usual") -> str:
    return f"{name} {verb} from {before:.3g} ({when}) to {now:.3g}"


_MISMATCH = (
    "raise quant.align (off < linears < model < exact); if it is model or exact already, `python -m qarl.diagnose` "
    "says which tokens differ"
)
SIGNS: dict[str, tuple[Rule, str]] = {
    "entropy": (
        jumps(
            ("rollout/entropy", 2.0),
            ("rollout/entropy", 1 / 3),
            ("actor/entropy", 2.0),
            ("actor/entropy", 1 / 3),
        ),
        "lower optim.lr or add optim.lr_warmup_steps; if entropy rose, look at error_tokens/* and mismatch/*; if it "
        "fell, responses become alike: raise rollout.temperature",
    ),
    "grad_norm": (
        jumps(("actor/grad_norm", 5.0)),
        "lower optim.lr; lower actor.grad_clip to the usual norm; narrow actor.neg_seq_clip_ratio_high",
    ),
    "perplexity": (
        together(jumps(("mismatch/training_ppl", 2.0)), jumps(("actor/grad_norm", 2.0))),
        "look at mismatch/* and error_tokens/*; raise quant.align; lower optim.lr",
    ),
    "update_size": (
        _update_size,
        "lower optim.lr or add optim.lr_warmup_steps; lower actor.ppo_epochs, or raise actor.ppo_mini_batch_size; with "
        "actor.loss=tbpo, narrow the bands",
    ),
    "ratio_mismatch": (
        _ratio_mismatch,
        "set actor.old_log_probs=recompute, and rollout_correction.bypass_mode=false; or raise quant.align to model or "
        "exact",
    ),
    "delta_tail": (trend("mismatch/abs_p999", 3.0, least=0.05), _MISMATCH),
    "k3": (trend("mismatch/k3", 4.0, least=LARGE_K3), _MISMATCH),
    "skew": (
        _skew,
        "raise quant.align to model or exact; lower actor.seq_tis_imp_ratio_cap, or set "
        "actor.mismatch_outside_cap=drop",
    ),
    "length": (
        jumps(("response_length/mean", 1.5), ("response_length/mean", 1 / 1.5), recent=5),
        "read the responses: the reward may favour long ones, or responses may not end; lower optim.lr",
    ),
    "repetition": (
        _repetition,
        "read the responses; narrow actor.neg_seq_clip_ratio_high, raise quant.align, lower optim.lr",
    ),
    "equal_rewards": (
        idle("actor/zero_advantage_frac", "all responses to each prompt had the same reward"),
        "use prompts that are sometimes solved and sometimes not, or a larger rollout.n; if the task is solved, stop",
    ),
    "all_masked": (
        idle(
            "overlong/masked_frac",
            "data.max_response_length cut off every response, which is left out of the loss",
        ),
        "raise data.max_response_length; or set actor.mask_truncated_responses=false, and reward.overlong_buffer_len, "
        "which teaches shorter responses",
    ),
}
"""Maps the name of a sign to the rule that finds it, and its remedy."""
