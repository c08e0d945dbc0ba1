"""The words and the arithmetic of a line of progress. Everything here is a pure function."""

from __future__ import annotations

from collections.abc import Sequence

MINUTE = 60
HOUR = 3600
LEAST_SECONDS = 1.0
"""A rate or an estimate after less time than this would be noise."""
LEAST_NAME = 4
"""Columns that the beginning of the outer names needs to say anything."""


def duration(seconds: float) -> str:
    """Return a duration as people say it: "59 s", "2 min 05 s", "1 h 01 min"."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02} s"
    return f"{whole // HOUR} h {whole % HOUR // MINUTE:02} min"


def rate(count: float, seconds: float) -> str | None:
    """Return `count / seconds` with at least two digits ("312", "4.7"), or None after too little time."""
    if seconds < LEAST_SECONDS:
        return None
    value = count / seconds
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def share_done(
    done: int,
    total: int,
    *,
    tokens: int | None = None,
    tokens_of_done: int = 0,
    tokens_before: int | None = None,
) -> float | None:
    """Return the share of the work that is done, above 0 and up to 1, or None while nobody can tell.

    Responses are sampled side by side and end late, so their number says little. Their tokens say more.

    done, total      responses, or other units of equal work
    tokens           tokens of all responses so far, also of those that have not ended, or None if nobody counts them
    tokens_of_done   those of the responses that have ended
    tokens_before    tokens of the last phase with as many responses. Without it, the mean length of the responses that
                     have ended stands for that of all
    """
    if not total:
        return None
    expected = 0.0
    if tokens_before is not None:
        expected = tokens_before
    elif done:
        expected = total * tokens_of_done / done
    if tokens and tokens < expected:
        return tokens / expected
    # Nobody counts tokens, or there are more than expected.
    return min(1.0, done / total) or None


def seconds_left(share: float | None, elapsed: float) -> float | None:
    """Return the seconds that the rest of the work takes if it goes on as fast. None: nobody can tell yet."""
    if share is None or elapsed < LEAST_SECONDS:
        return None
    return elapsed * (1 - share) / share


def amount(done: int, total: int | None, unit: str) -> str:
    """Return "3 of 8 micro-batches", or "3 micro-batches" if the total is unknown."""
    return f"{done} {unit}" if total is None else f"{done} of {total} {unit}"


def line(names: Sequence[str], elapsed: float, figures: Sequence[str], width: int | None) -> str:
    """Return the line. It is not longer than `width` columns, unless that is None.

    `names`: those of the open phases, the outermost first. `elapsed`: seconds of the innermost. `figures`: its own. If
    there are too many columns, the outer names are cut first, then the end."""
    *outer, inner = names
    text = f"{inner} ({duration(elapsed)})"
    if figures:
        text += f": {', '.join(figures)}"
    around = ", ".join(outer)
    whole = f"{around}, {text}" if around else text
    if width is None or len(whole) <= width:
        return whole
    room = width - len(text) - len(", ")
    if around and room >= LEAST_NAME:
        return f"{cut(around, room)}, {text}"
    return cut(text, width)


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` columns."""
    if len(text) <= width:
        return text
    return text[: width - 1] + "…" if width > 0 else ""
