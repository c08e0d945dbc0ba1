"""The answer that a response votes for when the majority of a prompt's responses counts (`val/maj@N`).

A reward function says it under `pred` in its dict, as in verl. Of the built-in functions these read the answer that
they compare from the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qarl.data.answer_forms import last_boxed, last_number, normal_answer
from qarl.data.reward_outcomes import Scored


def _of_math(text: str) -> str | None:
    boxed = last_boxed(text)
    return last_number(text) if boxed is None else normal_answer(boxed)


READERS: dict[str, Callable[[str], str | None]] = {
    "arithmetic": last_number,
    "math_verify": _of_math,
}
"""Built-in function -> what reads the answer. Two answers are the same if their texts are."""


def vote_of(functions: Sequence[str], text: str, outcome: Scored) -> str | None:
    """Return the answer in a response's `text`, or None if it is not known. `functions`: the run's reward functions."""
    answer = (outcome.more or {}).get("pred")
    if answer is not None:
        return str(answer)
    return next((READERS[name](text) for name in functions if name in READERS), None)
