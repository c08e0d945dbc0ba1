"""Entries of generated problems as text: every value comes back with its type."""

from __future__ import annotations

import math

import numpy
import pytest

from qarl.data.entry_text import from_text, to_text


def same(a: object, b: object) -> bool:
    """Whether two values are equal and all their parts have equal types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(
    "value",
    [
        "é\u2028\x00 \\ \"'",
        2**200,
        -0.1,
        math.inf,
        None,
        True,
        [1, [2.0, ["3"]], []],
        (1, (2, [3]), ()),
        {1: "a", "1": "b", (2, 3): None},
        {"$tuple": [1]},
        {"$tuple": [1], "more": (2,)},
        {"a": {"b": {"c": (1,)}}},
        {1, 2, 3},
        frozenset({("a", 1)}),
        numpy.float64(1 / 3),
        numpy.str_("text"),
        numpy.int8(-3),
        numpy.bool_(True),
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        numpy.zeros((0, 3)),
    ],
    ids=repr,
)
def test_every_value_comes_back_with_its_type(value: object) -> None:
    assert same(from_text(to_text(value)), value)


def test_nan_comes_back() -> None:
    assert math.isnan(from_text(to_text(math.nan)))


def test_equal_sets_have_equal_texts() -> None:
    assert to_text({"b", "a", "c"}) == to_text({"c", "b", "a"})


@pytest.mark.parametrize(
    "value",
    [object(), {"a": [1j]}, numpy.array([object()])],
    ids=["object", "complex in a list", "array of objects"],
)
def test_a_type_without_a_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        to_text(value)


def test_a_text_makes_no_other_types() -> None:
    with pytest.raises(ValueError, match=r"\$module is no type"):
        from_text('{"$module": ["os"]}')
