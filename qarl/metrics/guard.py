"""The measured mismatch against the limit of its alignment level: an error before the first update, a warning later.

δ is a sampled token's log-prob in the trainer less the engine's, and `mismatch/abs_mean` the mean of |δ| over the
tokens of a batch. Each level promises something about it. A broken promise means that the two sides compute different
models (a config key that only one of them honours, a weight that no publish writes, another sampling distribution),
and no loss repairs that.

The limits lie between the healthy values that README lists and `scripts/mismatch_guard_check.py` measures again, and
the known mistakes, which begin at 2.1e-2. Neither torch nor vLLM is imported: both backends call this.
"""

from __future__ import annotations

from qarl.errors import UserError

DEFAULT_LIMITS = {"off": 0.5, "linears": 0.15, "model": 1e-2, "exact": 1e-4}
"""Largest mean |δ| in nats a token that a level may show, for responses of any length.

`off` and `linears`: about five times what healthy runs showed (9e-2 and 2e-2 with trained weights; with random ones in
mixtures of experts 1e-1). `model`: see `MODEL_LIMIT`. `exact`: 0 is promised; vLLM's attention on several threads, or
the log-softmax of another release, may leave 1e-6.
"""
MODEL_LIMIT = (5e-3, 5e-6)
"""Limit at `model` for short responses, and what each response token adds, up to `DEFAULT_LIMITS["model"]`.

There δ comes from the order in which attention sums the keys, so it grows with the length, and with the breadth of the
distributions. At 50 tokens it is 0, or with AMX tiles 1e-4 (the quickstart) to 1.8e-3 (random weights); at 1000 at most
1.6e-3. The limits there are 5.3e-3 and 1e-2, which is half of the smallest known mistake.
"""
COLDEST = 0.25
"""Limits are divided by the temperature, as rounded logits are: down to this one, below which distributions are so
sharp that most tokens have no δ. Random weights had 1.8e-3 at 1, 3.3e-3 at 0.5, 3.9e-3 at 0.3, 6.7e-3 at 0.1."""


class MismatchError(UserError):
    """The mismatch is over its limit and nothing has been trained yet."""


def resolve_limit(
    limit: float | None, level: str, *, response_length: float | None = None, temperature: float = 1.0
) -> float:
    """The limit of mean |δ|: `limit` (`quant.mismatch_limit`) if given, else the default of `level`.

    Args:
        level: the alignment level that is applied, which may be lower than the one asked for.
        response_length: mean number of tokens of the measured responses; None for the limit of long ones.
        temperature: that the responses were sampled at. At `exact`, where 0 is promised, it does not count.
    """
    if limit is not None:
        return limit
    allowed = DEFAULT_LIMITS[level]
    if level == "model" and response_length is not None:
        base, per_token = MODEL_LIMIT
        allowed = min(base + per_token * response_length, allowed)
    return allowed if level == "exact" else allowed / min(max(temperature, COLDEST), 1.0)


def over_limit(abs_mean: float, limit: float) -> bool:
    """Whether a mean |δ| is over its limit; NaN is."""
    return not abs_mean <= limit


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
    """None if the mean |δ| `abs_mean` is within the limit (see `resolve_limit`), else the text of a warning.

    `source`: how the text says where the limit comes from; None for the level, or for `quant.mismatch_limit`.

    Raises:
        MismatchError: it is over the limit and `before_first_update`, when no weight has moved yet.
    """
    allowed = resolve_limit(limit, level, response_length=response_length, temperature=temperature)
    if not over_limit(abs_mean, allowed):
        return None
    found = f"mean |δ| between trainer and engine is {abs_mean:.2g} nats a token, over the {allowed:.2g}"
    source = source or (f"that quant.align={level} allows" if limit is None else "of quant.mismatch_limit")
    if not before_first_update:
        return f"{found} {source}; the trainer may be learning from another policy than the one that samples"
    raise MismatchError(
        f"trainer and engine disagree: {found} {source}",
        where="mismatch/abs_mean, before the first update",
        why="they compute different distributions: a key of the model's config or of sampling that one side ignores, "
        "weights that are not published, or an alignment that does not fit this model or machine",
        fix="compare token by token with `python -m qarl.diagnose`; choose another quant.align or model, or raise "
        "quant.mismatch_limit if this mismatch is intended",
    )
