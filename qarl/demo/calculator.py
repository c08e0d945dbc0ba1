"""The environment of `configs/calculator.yaml`: a calculator, called in one turn and read in the next.

A turn that is an operation of two whole numbers, such as `384*57`, is answered with its result. A turn that begins with
`=` states the answer, and ends the conversation: it earns 1 if it is right. Anything else is answered with `?`.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from qarl.turns.conversation import Message

_OPERATION = re.compile(r"(\d{1,9})([+*-])(\d{1,9})")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def answer(messages: list[Message], ground_truth: str, **_: Any) -> Any:
    """Return the reply to the last turn (`qarl.turns.reply`)."""
    turn = messages[-1]["content"]
    if turn.startswith("="):
        return {"reply": None, "reward": float(turn[1:] == ground_truth)}
    return calculated(turn)


def calculated(text: str) -> str:
    """Return the result of an operation, or `?` if `text` is none."""
    found = _OPERATION.fullmatch(text)
    if found is None:
        return "?"
    left, sign, right = found.groups()
    return str(_OPERATORS[sign](int(left), int(right)))
