"""The guard by hand-worked numbers: healthy values pass at every level, known mistakes do not."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from qarl.errors import UserError
from qarl.metrics.mismatch_limit import (
    DEFAULT_LIMITS,
    MismatchError,
    check_mismatch,
    check_noise,
    noise_limit,
    resolve_limit,
    times_noise,
)

HEALTHY = [
    ("exact", 0.0, 1000),
    ("exact", 1.2e-6, 50),
    ("model", 0.0, 50),
    ("model", 1.5e-4, 1000),
    ("model", 9.2e-4, 1000),
    ("model", 1.6e-3, 1000),
    ("model", 1.0e-4, 50),
    ("linears", 1.3e-3, 50),
    ("linears", 2.1e-2, 1000),
    ("linears", 1e-1, 50),
    ("off", 5.2e-2, 1000),
    ("off", 1.9e-2, 50),
]
BROAD = [
    ("model", 1.8e-3, 63, 1.0),
    ("model", 3.0e-3, 56, 0.7),
    ("model", 4.3e-3, 62, 0.7),
    ("linears", 2.1e-2, 1000, 0.25),
]
"""Figures of random models, whose distributions are broad, with the temperature (the proof `top_p`)."""
MISTAKES = [
    ("model", 3.4e-2, "biases that no publish writes"),
    ("model", 2.1e-2, "top_p 0.5 of one side"),
    ("model", 1.5, "partial_rotary_factor of one side"),
    ("model", 5.3, "logit_scale of one side"),
    ("exact", 2.1e-2, "top_p 0.5 of one side"),
    ("linears", 1.5, "partial_rotary_factor of one side"),
    ("off", 1.5, "partial_rotary_factor of one side"),
]


@pytest.mark.parametrize(("level", "abs_mean", "length"), HEALTHY)
def test_healthy_values_pass_with_room_to_spare(level, abs_mean, length):
    for first in (True, False):
        assert (
            check_mismatch(1.4 * abs_mean, limit=None, level=level, before_first_update=first, response_length=length)
            is None
        )


@pytest.mark.parametrize(("level", "abs_mean", "length", "temperature"), BROAD)
def test_broad_distributions_and_low_temperatures_pass(level, abs_mean, length, temperature):
    """A step of rounding in a logit is a larger one over a temperature below 1."""
    assert (
        check_mismatch(
            1.4 * abs_mean,
            limit=None,
            level=level,
            before_first_update=True,
            response_length=length,
            temperature=temperature,
        )
        is None
    )


def test_the_temperature_by_hand():
    for temperature, scale in ((1.0, 1), (2.0, 1), (0.5, 2), (0.25, 4), (0.1, 4), (0.005, 4)):
        for level, base in (("model", 6e-3), ("linears", 0.15), ("off", 1.0)):
            found = resolve_limit(None, level, response_length=200, temperature=temperature)
            assert found == pytest.approx(scale * base, rel=1e-12)
        assert resolve_limit(None, "exact", temperature=temperature) == 1e-4
        assert resolve_limit(0.02, "model", temperature=temperature) == 0.02


@pytest.mark.parametrize(("level", "abs_mean", "what"), MISTAKES)
@pytest.mark.parametrize("length", [1, 80, 1000, 16384, None])
def test_known_mistakes_are_an_error_first_and_a_warning_later(level, abs_mean, what, length):
    with pytest.raises(MismatchError) as error:
        check_mismatch(abs_mean, limit=None, level=level, before_first_update=True, response_length=length)
    assert isinstance(error.value, UserError)
    assert f"{abs_mean:.2g}" in str(error.value) and "quant.mismatch_limit" in str(error.value)
    warning = check_mismatch(abs_mean, limit=None, level=level, before_first_update=False, response_length=length)
    assert warning and f"{abs_mean:.2g}" in warning and f"quant.align={level}" in warning


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [None, 0.0, 1e9])
def test_what_is_not_finite_is_over_every_limit(bad, limit):
    for level in DEFAULT_LIMITS:
        with pytest.raises(MismatchError):
            check_mismatch(bad, limit=limit, level=level, before_first_update=True)
        assert check_mismatch(bad, limit=limit, level=level, before_first_update=False)


@pytest.mark.parametrize(
    ("limit", "level", "length", "expected"),
    [
        (None, "off", 10, 1.0),
        (None, "linears", 10, 0.15),
        (None, "exact", 10_000, 1e-4),
        (None, "model", 0, 5e-3),
        (None, "model", 80, 5.4e-3),
        (None, "model", 1000, 1e-2),
        (None, "model", 100_000, 1e-2),
        (None, "model", None, 1e-2),
        (0.0, "off", 10, 0.0),
        (3.0, "exact", None, 3.0),
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
        ([0.0, 0.0], [1e-4, 1e-4], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([4e-6, 4e-6], [0.0, 0.0], 4.0),  # noise of at least 1e-6
    ],
)
def test_times_noise_by_hand(deltas, noises, expected):
    roots = (sum(map(math.sqrt, values)) for values in (deltas, noises))
    assert times_noise(*roots, len(deltas)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_limit_on_the_noise_by_hand():
    """Three standard errors more than for very many tokens: 30% of 100 tokens, 300% of one."""
    for level, tokens, expected in (
        ("off", 100, 1.56),
        ("linears", 900, 1.32),
        ("model", 100, 0.52),
        ("model", 1, 1.6),
    ):
        assert noise_limit(level, tokens) == pytest.approx(expected, rel=1e-12)
        check_noise(0.999 * expected, level=level, tokens=tokens)
        for over in (1.001 * expected, math.nan, math.inf):
            with pytest.raises(MismatchError, match=f"quant.align={level} allows"):
                check_noise(over, level=level, tokens=tokens)
    check_noise(5.0, level="exact", tokens=100)
    check_noise(math.nan, level="linears", tokens=0)


def test_the_limit_itself_is_allowed():
    assert check_mismatch(0.0, limit=0.0, level="model", before_first_update=True) is None
    with pytest.raises(MismatchError, match=r"of quant\.mismatch_limit"):
        check_mismatch(1e-9, limit=0.0, level="model", before_first_update=True)


def test_levels_are_those_of_the_config():
    from typing import get_args

    from qarl.config.schema import QuantConfig

    assert set(DEFAULT_LIMITS) == set(get_args(QuantConfig.model_fields["align"].annotation))


def test_neither_torch_nor_vllm_is_imported():
    code = "import sys, qarl.metrics.mismatch_limit; sys.exit(bool({'torch', 'vllm', 'verl'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
