"""Worked sums of four numbers: arithmetic whose answers are long enough for small errors to accumulate.

A problem is four numbers of four digits. The answer adds them one after the other. Each addition is written in the
columns of `column_addition` and closes with the running sum; only the last number is scored:

    prompt    4831+7294+1022+3345
    response  1+4+0=05 3+9+0=12 8+2+1=11 4+7+1=12 =12125 5+2+0=07 ... =13147 7+5+0=12 ... =16492

An answer takes 126 to 147 tokens of one character, end-of-text included. A wrong digit in a running sum is carried
through all later additions, so one slip anywhere spoils the answer.
"""

from __future__ import annotations

import random

from qarl.demo.column_addition import response_text as worked_addition

DATA_SOURCE = "addition_chain"
OPERANDS, DIGITS = 4, 4

Operands = tuple[int, ...]


def prompt_text(operands: Operands) -> str:
    """The user message: `4831+7294+1022+3345`."""
    return "+".join(map(str, operands))


def response_text(operands: Operands) -> str:
    """The worked answer: one addition after the other, the total last."""
    total, additions = operands[0], []
    for operand in operands[1:]:
        additions.append(worked_addition((total, operand)))
        total += operand
    return " ".join(additions)


def answer(operands: Operands) -> str:
    """The ground truth that the reward `arithmetic` compares with."""
    return str(sum(operands))


def draw(count: int, rng: random.Random, exclude: set[Operands] | frozenset[Operands]) -> list[Operands]:
    """`count` distinct problems, none of them in `exclude`."""
    problems: dict[Operands, None] = {}
    while len(problems) < count:
        operands = tuple(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(OPERANDS))
        if operands not in exclude:
            problems[operands] = None
    return list(problems)
