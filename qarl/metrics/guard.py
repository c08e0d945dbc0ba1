"""Compare the measured mismatch with the limit of the alignment level. A mismatch over the limit is an error before the
first update, and a warning after it.

δ is a sampled token's log-prob in the trainer minus its log-prob in the engine. `mismatch/abs_mean` is the mean of |δ|
over the tokens of a batch. Each level has a limit for this mean. A larger mean shows that the two sides compute
different models. For example, only one of them follows a config key, a weight is not published, or the sampling
distributions differ. No loss can correct such mistakes.

Healthy values, which docs/alignment.md lists and `scripts/mismatch_guard_check.py` measures, are below the limits.
Known mistakes are above them, at 2.1e-2 or more. Both backends call this module, so it imports neither torch nor vLLM.
"""

from __future__ import annotations

from qarl.errors import UserError

DEFAULT_LIMITS = {"off": 0.5, "linears": 0.15, "model": 1e-2, "exact": 1e-4}
"""Largest allowed mean |δ| of each level in nats per token, for responses of any length.

`off` and `linears`: about five times the values of healthy runs (9e-2 and 2e-2 with trained weights; 1e-1 with random
weights in mixtures of experts). `model`: see `MODEL_LIMIT`. `exact`: the mismatch should be 0, but vLLM's attention on
several threads, or the log-softmax of a different release, may cause 1e-6.
"""
MODEL_LIMIT = (5e-3, 5e-6)
"""Limit at `model` for short responses, and the amount that each response token adds, up to `DEFAULT_LIMITS["model"]`.

At this level δ comes from the order in which attention sums over keys. So it grows with the length of the responses and
with the entropy of the distributions. At 50 tokens the mean |δ| is 0, or with AMX tiles 1e-4 (quickstart) to 1.8e-3
(random weights). The limit is then 5.3e-3. At 1000 tokens the mean is at most 1.6e-3. The limit is then 1e-2, which is
half of the smallest known mistake.
"""
COLDEST = 0.25
"""Limits are divided by the temperature, or by this value if the temperature is lower. The logits are also divided by
the temperature, so their rounding errors grow by the same factor. At very low temperatures, distributions are so sharp
that most tokens have δ = 0. Random weights gave 1.8e-3 at temperature 1, 3.3e-3 at 0.5, 3.9e-3 at 0.3, 6.7e-3 at 0.1.
"""


class MismatchError(UserError):
    """The mismatch is over its limit and nothing has been trained yet."""


def resolve_limit(
    limit: float | None, level: str, *, response_length: float | None = None, temperature: float = 1.0
) -> float:
    """Return the limit of mean |δ|: `limit` (`quant.mismatch_limit`) if given, else the default of `level`.

    Args:
        level: the alignment level that was applied, which may be lower than the one asked for.
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

    `source`: words that say where the limit comes from; by default these name the level or `quant.mismatch_limit`.
    Raises MismatchError, instead of returning the warning, if `before_first_update` is true.
    """
    allowed = resolve_limit(limit, level, response_length=response_length, temperature=temperature)
    if abs_mean <= allowed:  # false for NaN, which is over every limit
        return None
    found = f"mean |δ| between trainer and engine is {abs_mean:.2g} nats per token, over the {allowed:.2g}"
    source = source or (f"that quant.align={level} allows" if limit is None else "of quant.mismatch_limit")
    if not before_first_update:
        return f"{found} {source}; the policy that samples may differ from the one that the trainer updates"
    raise MismatchError(
        f"trainer and engine disagree: {found} {source}",
        where="mismatch/abs_mean, before the first update",
        why="they compute different distributions: one side may ignore a key of the model's config or of sampling, "
        "weights may not be published, the alignment may not fit this model or machine, or text was changed after it "
        "was sampled",
        fix="compare token by token with `python -m qarl.diagnose`; choose a different quant.align or model, or raise "
        "quant.mismatch_limit if this mismatch is intended",
    )
