"""The words and numbers of a line of progress, each worked by hand."""

from __future__ import annotations

import pytest

from qarl.progress.text import amount, cut, duration, line, rate, seconds_left, share_done


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3661, "1 h 01 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "seconds", "words"),
    [
        (5000, 16, "312"),
        (0, 4, "0.0"),
        (14, 3, "4.7"),
        (100, 10, "10"),
        (99, 0, None),
        (99, 0.9, None),
    ],
)
def test_rates(count: int, seconds: float, words: str | None) -> None:
    assert rate(count, seconds) == words


@pytest.mark.parametrize(
    ("done", "total", "share"), [(0, 8, None), (2, 8, 0.25), (8, 8, 1), (9, 8, 1), (0, 0, None)]
)
def test_the_share_of_equal_units(done: int, total: int, share: float | None) -> None:
    assert share_done(done, total) == share


def test_the_share_of_responses_is_that_of_their_tokens() -> None:
    # 2 of 8 have ended after 10 tokens on average, so 80 are expected, and 60 are there.
    assert share_done(2, 8, tokens=60, tokens_of_done=20) == 60 / 80
    # The last phase had 120 tokens.
    assert share_done(2, 8, tokens=60, tokens_of_done=20, tokens_before=120) == 60 / 120
    assert share_done(0, 8, tokens=60, tokens_before=120) == 60 / 120
    # No response has ended, and there was no phase before.
    assert share_done(0, 8, tokens=60) is None
    # More tokens than expected: then the responses that have ended say how far it is.
    assert share_done(2, 8, tokens=90, tokens_of_done=20) == 2 / 8
    assert share_done(6, 8, tokens=150, tokens_of_done=100, tokens_before=120) == 6 / 8
    # Nothing has begun.
    assert share_done(0, 8, tokens=0, tokens_before=120) is None


def test_the_seconds_left() -> None:
    assert seconds_left(0.25, 10.0) == 30.0  # three times what the first quarter took
    assert seconds_left(1.0, 10.0) == 0.0
    assert seconds_left(None, 10.0) is None
    assert seconds_left(0.5, 0.0) is None


def test_amounts() -> None:
    assert amount(3, 8, "micro-batches") == "3 of 8 micro-batches"
    assert amount(3, None, "rows") == "3 rows"


FIGURES = ["3 of 8 micro-batches", "about 30 s left"]
WHOLE = "step 3/100, update (18 s): 3 of 8 micro-batches, about 30 s left"


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (None, WHOLE),
        (len(WHOLE), WHOLE),
        (len(WHOLE) - 1, "step 3/1…, update (18 s): 3 of 8 micro-batches, about 30 s left"),
        (58, "ste…, update (18 s): 3 of 8 micro-batches, about 30 s left"),
        (57, "update (18 s): 3 of 8 micro-batches, about 30 s left"),
        (20, "update (18 s): 3 of…"),
        (1, "…"),
        (0, ""),
    ],
)
def test_a_line_fits_the_terminal(width: int | None, words: str) -> None:
    assert line(["step 3/100", "update"], 18.2, FIGURES, width) == words
    assert width is None or len(words) <= width


def test_a_line_without_figures() -> None:
    assert line(["publishing"], 3, [], None) == "publishing (3 s)"


def test_cutting() -> None:
    assert [cut("abcde", width) for width in (5, 4, 1, 0)] == ["abcde", "abc…", "…", ""]
