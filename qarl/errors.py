"""The exception for problems that a user can fix: a bad config, bad data, an unusable machine.

An error says what is wrong, where, why, and how to fix it. The command line prints it without a traceback and exits
with code 2. Bugs of QaRL raise ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """An error that the user can fix. `what` says what is wrong. `where`, `why` and `fix` are optional lines."""

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        parts = [("", what), ("where: ", where), ("why: ", why), ("fix: ", fix)]
        super().__init__("\n  ".join(label + text for label, text in parts if text))


def alternatives(words: Sequence[str]) -> str:
    """Return `words` as a choice: `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def shortened(value: Any, length: int = 200) -> str:
    """Return the start of `repr(value)`, for an error."""
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."


def first_cause(error: BaseException) -> BaseException:
    """Return the error that a process of Ray raised, which Ray hands on inside its own errors as `cause`."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def in_one_line(error: BaseException) -> str:
    """Return the type and the message of an error's first cause."""
    cause = first_cause(error)
    return " ".join(f"{type(cause).__name__}: {cause}".split())
