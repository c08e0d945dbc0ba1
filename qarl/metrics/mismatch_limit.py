"""Compare the measured mismatch with the limit of the alignment level. Before the first update, a mismatch over the
limit is an error. Later it is a warning.

δ is a sampled token's log-prob in the trainer minus its log-prob in the engine. `mismatch/abs_mean` is the mean of |δ|
over the tokens of a batch. Each alignment level has a limit for this mean. A larger mean shows that trainer and engine
compute different models, for example because a weight is not published. No loss can correct such a mistake.

These limits must suit every model, so they are wide. Before training, a second limit suits the model at hand:
`check_noise` compares |δ| with the model's own noise (`qarl.align.rounding_noise`), on the same tokens.

docs/alignment.md lists the values of healthy runs, which are below the limits, and of mistakes, which are above.
`python -m benchmarks.proofs mismatch_guard` measures both. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import math

from qarl.errors import UserError

DEFAULT_LIMITS = {"off": 1.0, "linears": 0.15, "model": 1e-2, "exact": 1e-4}
"""Largest allowed mean |δ| of each level, in nats per token.

- `off` and `linears`: ten and seven times the values of healthy runs with trained weights, which are 9e-2 and 2e-2.
  With random weights they are at most 0.6 (Nemotron) and 1e-1 (mixtures of experts).
- `model`: the limit for long responses. See `MODEL_LIMIT` for short ones.
- `exact`: the mismatch should be 0, but vLLM's attention on several threads, or the log-softmax of a different release,
  may cause 1e-6.
"""
MODEL_LIMIT = (5e-3, 5e-6)
"""At `model`, the limit for responses of n tokens is `MODEL_LIMIT[0] + n * MODEL_LIMIT[1]`, at most
`DEFAULT_LIMITS["model"]`.

Where the trainer cannot call the engine's attention, δ comes from the order in which attention sums over keys, so it
grows with the length of the responses. Measured with attention in PyTorch, on CPUs:

    50 tokens      limit 5.3e-3; 0, or with AMX tiles 1e-4 (quickstart) to 1.8e-3 (random weights)
    1000 tokens    limit 1e-2, half of the smallest known mistake; at most 1.6e-3
"""
COLDEST = 0.25
"""Limits are divided by the temperature, but not by less than this value. The reason is that sampling divides the
logits, and so their rounding errors, by the temperature. Measured mean |δ| with random weights: 1.8e-3 at temperature
1, 3.3e-3 at 0.5, 3.9e-3 at 0.3, 6.7e-3 at 0.1.
"""

NOISE_LIMITS = {"off": 1.2, "linears": 1.2, "model": 0.4}
"""Largest allowed |δ| before training, as a multiple of the noise (`times_noise`), if very many tokens are compared.

- `off` and `linears`: healthy runs have 0.5 to 0.9. At `off`, too, the compared forward multiplies by the published
  tensors.
- `model`: healthy runs have 0 with the engine's attention. With attention in PyTorch they had 0 to 0.1.

At `exact` there is no noise, and the limit of `DEFAULT_LIMITS` is stricter.
"""
SMALLEST_NOISE = 1e-6
"""Noise in nats per token that every model is allowed, because FP32 log-softmaxes differ that much."""


class MismatchError(UserError):
    """The mismatch is over its limit and nothing has been trained yet."""


def resolve_limit(
    limit: float | None,
    level: str,
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
    allowed = DEFAULT_LIMITS[level]
    if level == "model" and response_length is not None:
        base, per_token = MODEL_LIMIT
        allowed = min(base + per_token * response_length, allowed)
    return allowed if level == "exact" else allowed / min(max(temperature, COLDEST), 1.0)


def check_mismatch(
    abs_mean: float,
    *,
    limit: float | None,
    level: str,
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


def noise_limit(level: str, tokens: float) -> float:
    """Return the largest allowed `times_noise` of `tokens` tokens: three standard errors over `NOISE_LIMITS`, for a
    standard deviation of a token's value that is as large as its mean."""
    return NOISE_LIMITS[level] * (1 + 3 / math.sqrt(tokens))


def check_noise(times: float, *, level: str, tokens: float) -> None:
    """Raise MismatchError if |δ|, `times` the noise of `tokens` tokens, is more than rounding explains at `level`."""
    if level not in NOISE_LIMITS or not tokens or times <= noise_limit(level, tokens):
        return
    raise MismatchError(
        f"trainer and engine compute different models: with the published weights on both sides, |δ| is {times:.2g} "
        f"times what other roundings do to this model; quant.align={level} allows {noise_limit(level, tokens):.2g}",
        where=f"log-probs of {tokens:.0f} sampled tokens, before the first update",
        why="possible reasons: only one side uses a key of the model's config; weights or buffers differ; or a family "
        "whose layers the two sides compute differently",
        fix="compare token by token with `python -m qarl.diagnose`; choose a different model; or set "
        "quant.mismatch_limit to the mean |δ| that you accept, which replaces this check",
    )
