"""Read numbers and answers as people write them, in ground truths and in responses, for the built-in rewards.

The forms are those of common data sets and models: "... #### 72" (GSM8K), "\\boxed{72}" (MATH), "The answer is 72.",
"<answer>72</answer>", "$1,000", "72.0", "(A)". Where a form has two readings, the one that would reward a wrong answer
is not taken: "5-3" ends in 3 and not in -3, "1, 000" is two numbers, and "(A) or (B)" is no choice.
"""

from __future__ import annotations

import re
from typing import Any

# A minus belongs to a number only if it cannot be a subtraction: "5-3" ends in 3, "= -3" in -3. Commas belong to a
# number only if they separate thousands, and a point only if digits follow.
_SIGN = r"(?:(?<![\w)\]])[-\u2212](?:\\?\$)?)?"
_THOUSANDS = r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)"
_NUMBER = re.compile(rf"{_SIGN}(?:(?:{_THOUSANDS}|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)", flags=re.ASCII)
_DOLLAR = re.compile(r"^(-?)\\?\$")

_STATEMENT = re.compile(r"(?:answer\s*(?:is|:|=)|####)[\s:]*([^\n]*)", flags=re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", flags=re.IGNORECASE | re.DOTALL)
_MARK_UP = ("**", "$", "\\(", "\\)", "\\[", "\\]", "`")
_TEXT = re.compile(r"^\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}$")
_CHOICE = re.compile(r"^\(([A-J])\)")
_LETTER = re.compile(r"^\(?([A-J])\)?$")
_PERCENT = re.compile(r"(?<!\\)%")
_OTHER_CHOICE = re.compile(r"\([A-J]\)")


def last_number(text: str) -> str | None:
    """Return the last number in `text` in its plain form (`plain_number`), or None if there is none."""
    numbers = _NUMBER.findall(text)
    return plain_number(numbers[-1]) if numbers else None


def number_of_truth(truth: Any) -> str | None:
    """Return the number that a ground truth states, in its plain form, or None if it states no single number."""
    text = stated_truth(str(truth)).replace("\u2212", "-")
    text = _DOLLAR.sub(r"\1", text.strip("$ ").rstrip(".").strip())
    return plain_number(text) if _NUMBER.fullmatch(text) else None


def plain_number(number: str) -> str:
    """Return a number as text without thousands separators, leading zeros and zeros after its last decimal.

    It stays text, because `int` would refuse the thousands of digits that a model can write.
    """
    digits = number.replace("\u2212", "-").replace("$", "").replace("\\", "").replace(",", "")
    whole, _, decimals = digits.removeprefix("-").partition(".")
    decimals = decimals.rstrip("0")
    magnitude = (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")
    return f"-{magnitude}" if digits.startswith("-") and magnitude != "0" else magnitude


def stated_truth(truth: str) -> str:
    """Return the answer in a ground truth: what follows its last "####", or its last `\\boxed{...}`, or all of it."""
    text = truth.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed.strip()


def as_latex(truth: str) -> str:
    """Return an answer as LaTeX, in which a plain % begins a comment."""
    return _PERCENT.sub(r"\\%", truth)


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces match, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def states(response: str, truth: str) -> bool:
    """Return whether the answer that `response` states in words has the text of the ground truth's answer.

    A response states an answer by "<answer>...</answer>", "the answer is ...", "Answer: ..." or "#### ...", the last of
    which counts, or by having no other words. A response with `\\boxed` states nothing here: the box is its answer.
    """
    if "\\boxed" in response:
        return False
    tagged = _TAGGED.findall(response)
    statements = tagged or _STATEMENT.findall(response) or [response]
    expected = normal_answer(truth)
    stated = normal_answer(statements[-1])
    return bool(expected) and (stated == expected or _choice(stated) == expected)


def normal_answer(answer: str) -> str:
    """Return an answer without mark-up, spaces, a last full stop, and the parentheses of a choice."""
    for mark in _MARK_UP:
        answer = answer.replace(mark, "")
    answer = answer.replace("\u2212", "-").replace("\\%", "%").strip().rstrip(".").strip()
    answer = _TEXT.sub(r"\1", answer)
    letter = _LETTER.match(answer)
    return letter[1] if letter else "".join(answer.split())


def _choice(statement: str) -> str | None:
    """Return the letter of a statement like "(A) 5 cm", or None. `statement` has no spaces."""
    letter = _CHOICE.match(statement)
    return letter[1] if letter and len(_OTHER_CHOICE.findall(statement)) == 1 else None
