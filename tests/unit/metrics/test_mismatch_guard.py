"""The guard by hand-worked numbers: healthy values pass at every level, known mistakes do not."""

from __future__ import annotations

import math

import pytest

from qarl.config.level import Level
from qarl.errors import UserError
from qarl.metrics.mismatch_limit import (
    MismatchError,
    check_mismatch,
    check_noise,
    resolve_limit,
    times_noise,
)

MISTAKES = [
    (Level.MODEL, 3.4e-2, "biases that no publish writes"),
    (Level.LINEARS, 1.5, "partial_rotary_factor of one side"),
    (Level.OFF, 1.5, "partial_rotary_factor of one side"),
]


def test_the_temperature_by_hand():
    for temperature, scale in ((1.0, 1), (2.0, 1), (0.5, 2), (0.25, 4), (0.1, 4), (0.005, 4)):
        for level, base in ((Level.MODEL, 6e-3), (Level.LINEARS, 0.15), (Level.OFF, 1.0)):
            limit = resolve_limit(None, level, response_length=200, temperature=temperature)
            assert limit == pytest.approx(scale * base, rel=1e-12)
        assert resolve_limit(None, Level.EXACT, temperature=temperature) == 1e-4
        assert resolve_limit(0.02, Level.MODEL, temperature=temperature) == 0.02


@pytest.mark.parametrize(("level", "abs_mean", "what"), MISTAKES)
@pytest.mark.parametrize("length", [1, 1000, None])
def test_known_mistakes_are_an_error_first_and_a_warning_later(level, abs_mean, what, length):
    with pytest.raises(MismatchError) as error:
        check_mismatch(
            abs_mean, limit=None, level=level, before_first_update=True, response_length=length
        )
    assert isinstance(error.value, UserError)
    assert f"{abs_mean:.2g}" in str(error.value) and "quant.mismatch_limit" in str(error.value)
    with pytest.raises(MismatchError):
        check_mismatch(math.nan, limit=1e9, level=level, before_first_update=True)
    warning = check_mismatch(
        abs_mean, limit=None, level=level, before_first_update=False, response_length=length
    )
    assert warning and f"{abs_mean:.2g}" in warning and f"quant.align={level}" in warning


@pytest.mark.parametrize(
    ("limit", "level", "length", "expected"),
    [
        (None, Level.MODEL, 0, 5e-3),
        (None, Level.MODEL, 80, 5.4e-3),
        (None, Level.MODEL, 1000, 1e-2),
        (None, Level.MODEL, 100_000, 1e-2),
        (None, Level.MODEL, None, 1e-2),
        (0.0, Level.OFF, 10, 0.0),
        (3.0, Level.EXACT, None, 3.0),
    ],
)
def test_limits_by_hand(limit, level, length, expected):
    assert resolve_limit(limit, level, response_length=length) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("deltas", "noises", "expected"),
    [
        ([4e-4, 1e-4], [1e-4, 1e-4], 2.25),  # (0.02 + 0.01) / (0.01 + 0.01) = 1.5
        ([9e-4, 0.0], [1e-4, 4e-4], 1.0),
        ([0.25, 1e-4, 1e-4], [1e-4, 1e-4, 0.25], 1.0),  # a single token would decide a mean
        ([4e-6, 4e-6], [0.0, 0.0], 4.0),  # noise of at least 1e-6
    ],
)
def test_times_noise_by_hand(deltas, noises, expected):
    roots = (sum(map(math.sqrt, values)) for values in (deltas, noises))
    assert times_noise(*roots, len(deltas)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_limit_on_the_noise_by_hand():
    """Three standard errors more than for very many tokens: 30% of 100 tokens, 300% of one."""
    for level, tokens, expected in (
        (Level.OFF, 100, 1.56),
        (Level.LINEARS, 900, 1.32),
        (Level.MODEL, 100, 0.52),
        (Level.MODEL, 1, 1.6),
    ):
        assert level.tolerance.noise_limit(tokens) == pytest.approx(expected, rel=1e-12)
        check_noise(0.999 * expected, level=level, tokens=tokens)
        for over in (1.001 * expected, math.nan, math.inf):
            with pytest.raises(MismatchError, match=f"quant.align={level} allows"):
                check_noise(over, level=level, tokens=tokens)
    check_noise(5.0, level=Level.EXACT, tokens=100)
    check_noise(math.nan, level=Level.LINEARS, tokens=0)
