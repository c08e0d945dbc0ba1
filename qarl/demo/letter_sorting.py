"""Sorting letters by insertion: a task without numbers, with answers of 120 tokens.

A problem is 14 different letters. The answer inserts them one by one and writes the sorted letters after each; only the
last word is scored. With five letters:

    prompt    dkqba
    response  d dk dkq bdkq abdkq

An answer takes 119 tokens of one character, end-of-text included. A letter lost or misplaced is copied into all later
words, so one slip anywhere spoils the answer.
"""

from __future__ import annotations

import random
import string
from typing import Any

DATA_SOURCE = "letter_sorting"
LETTERS = 14


def prompt_text(letters: str) -> str:
    """The user message: the letters as they were drawn."""
    return letters


def response_text(letters: str) -> str:
    """The worked answer: the sorted first letter, the sorted first two, and so on."""
    return " ".join("".join(sorted(letters[:count])) for count in range(1, len(letters) + 1))


def answer(letters: str) -> str:
    """The ground truth that `last_word` compares with."""
    return "".join(sorted(letters))


def draw(count: int, rng: random.Random, exclude: set[str] | frozenset[str]) -> list[str]:
    """`count` distinct problems, none of them in `exclude`."""
    problems: dict[str, None] = {}
    while len(problems) < count:
        letters = "".join(rng.sample(string.ascii_lowercase, LETTERS))
        if letters not in exclude:
            problems[letters] = None
    return list(problems)


def last_word(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the last word of the response is `ground_truth`, else 0.0."""
    return float(solution_str.split()[-1:] == [ground_truth])
