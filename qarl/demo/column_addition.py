"""Worked column addition: the toy task of the quickstart, the ablations and the end-to-end tests.

A problem is two numbers of 4 or 5 digits. The answer adds column by column from the right, `a+b+carry=ct` with
c the new carry and t the digit, and closes with the sum; only that last number is scored:

    prompt    48310+7294
    response  0+4+0=04 1+9+0=10 3+2+1=06 8+7+0=15 4+0+1=05 =55604

Every column has nine characters, so an answer takes 42 to 53 tokens of one character, end-of-text included. A
half-trained model slips now and then (a wrong digit fetched, a carry lost, a digit copied wrong) in any column, and one
slip spoils the answer: about 50 chances each, which is what reinforcement learning can then remove.
"""

from __future__ import annotations

import random
from itertools import zip_longest

DATA_SOURCE = "column_addition"

OperandPair = tuple[int, int]


def prompt_text(pair: OperandPair) -> str:
    """The user message: `48310+7294`."""
    return f"{pair[0]}+{pair[1]}"


def response_text(pair: OperandPair) -> str:
    """The worked answer, columns from the right, the sum last."""
    columns, carry = [], 0
    for a, b in zip_longest(reversed(str(pair[0])), reversed(str(pair[1])), fillvalue="0"):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}+{carry}={total:02d}")
        carry = total // 10
    return f"{' '.join(columns)} ={sum(pair)}"


def draw_pairs(count: int, rng: random.Random, exclude: set[OperandPair] | frozenset[OperandPair]) -> list[OperandPair]:
    """`count` distinct operand pairs, none of them in `exclude` in either order."""
    pairs: dict[OperandPair, None] = {}
    while len(pairs) < count:
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.choice((4, 5)), rng.choice((4, 5))))
        if exclude.isdisjoint({(a, b), (b, a)}) and (b, a) not in pairs:
            pairs[a, b] = None
    return list(pairs)
