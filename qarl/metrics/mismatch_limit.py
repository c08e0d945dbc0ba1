"""Compare the measured mismatch with the limit of the alignment level. Before the first update, a mismatch over the
limit is an error. Later it is a warning.

δ is a sampled token's log-prob in the trainer minus its log-prob in the engine. `mismatch/abs_mean` is the mean of |δ|
over the tokens of a batch. Each alignment level has a limit for this mean. A larger mean shows that trainer and engine
compute different models, for example because a weight is not published. No loss can correct such a mistake.
`qarl.config.level` has the limits.

These limits must suit every model, so they are wide. Before training, a second limit suits the model at hand:
`check_noise` compares |δ| with the model's own noise (`qarl.align.rounding_noise`), on the same tokens.

docs/lookup/results/mismatch.md lists the values of healthy runs, which are below the limits, and of mistakes, which are
above. `python -m benchmarks.proofs mismatch_guard` measures both. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import math

from qarl.config.level import Level
from qarl.errors import UserError

SMALLEST_NOISE = 1e-6
"""Noise in nats per token that every model is allowed, because FP32 log-softmaxes differ that much."""


class MismatchError(UserError):
    """The mismatch is over its limit and nothing has been trained yet."""


def resolve_limit(
    limit: float | None,
    level: Level,
    *,
    response_length: float | None = None,
    temperature: float = 1.0,
) -> float:
    """Return the limit of mean |δ|: `limit` (`quant.mismatch_limit`) if given, else the default of `level`.

    Args:
        level: the applied alignment level, which may be lower than `quant.align`.
        response_length: mean tokens per measured response; None gives the limit for long responses.
        temperature: sampling temperature of the responses. It has no effect at `exact`.
    """
    if limit is not None:
        return limit
    return level.tolerance.mismatch_limit(response_length, temperature)


def check_mismatch(
    abs_mean: float,
    *,
    limit: float | None,
    level: Level,
    before_first_update: bool,
    response_length: float | None = None,
    source: str | None = None,
    temperature: float = 1.0,
) -> str | None:
    """Return the text of a warning if the mean |δ| `abs_mean` is over the limit (see `resolve_limit`), else None.

    `source`: text for the message that says where the limit comes from (default: the level or `quant.mismatch_limit`).
    If `before_first_update` is true, raise MismatchError instead of returning the warning.
    """
    allowed = resolve_limit(limit, level, response_length=response_length, temperature=temperature)
    if abs_mean <= allowed:  # false for NaN, which is over every limit
        return None
    measured = f"mean |δ| between trainer and engine is {abs_mean:.2g} nats per token, over the {allowed:.2g}"
    source = source or (
        f"that quant.align={level} allows" if limit is None else "of quant.mismatch_limit"
    )
    if not before_first_update:
        return f"{measured} {source}; the policy that samples may differ from the one that the trainer updates"
    raise MismatchError(
        f"trainer and engine disagree: {measured} {source}",
        where="mismatch/abs_mean, before the first update",
        why="possible reasons: only one side uses a key of the model's config or of sampling; weights are not "
        "published; text was changed after it was sampled; or the alignment does not fit this model or machine",
        fix="compare token by token with `python -m qarl.diagnose`; choose a different quant.align or model, or raise "
        "quant.mismatch_limit if this mismatch is intended",
    )


def times_noise(delta_roots: float, noise_roots: float, tokens: float) -> float:
    """Return how many times larger |δ| is than the noise: the square of the ratio of their mean square roots.

    `delta_roots`, `noise_roots`: sums over `tokens` tokens of sqrt(|δ|) and of sqrt(|noise|). Square roots, because a
    few tokens would decide a mean of |δ|. NaN if no token was compared.
    """
    if not tokens:
        return math.nan
    return (delta_roots / max(noise_roots, tokens * math.sqrt(SMALLEST_NOISE))) ** 2


def check_noise(times: float, *, level: Level, tokens: float) -> None:
    """Raise MismatchError if |δ|, `times` the noise of `tokens` tokens, is more than rounding explains at `level`."""
    if not level.tolerance.has_noise_limit or not tokens:
        return
    allowed = level.tolerance.noise_limit(tokens)
    if times <= allowed:  # false for NaN
        return
    raise MismatchError(
        f"trainer and engine compute different models: with the published weights on both sides, |δ| is {times:.2g} "
        f"times what other roundings do to this model; quant.align={level} allows {allowed:.2g}",
        where=f"log-probs of {tokens:.0f} sampled tokens, before the first update",
        why="possible reasons: only one side uses a key of the model's config; weights or buffers differ; or a family "
        "whose layers the two sides compute differently",
        fix="compare token by token with `python -m qarl.diagnose`; choose a different model; or set "
        "quant.mismatch_limit to the mean |δ| that you accept, which replaces this check",
    )
