"""Text of one row of mathematics: the problem, its reference answer as one box of LaTeX, and the key of a duplicate.

Pure functions. `qarl.data.rewards.math_verify` alone decides which answers are usable: the text is only brought into a
form that it reads well, and `verifies_itself` asks it.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from qarl.data.rewards import math_verify, math_verify_within

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# Longer texts are derivations whose answer is in no box.
LONGEST_ANSWER = 300
PATIENCE = 120
"""Seconds, to parse and to compare."""


class RowError(Exception):
    """Why a row cannot be used, in the words of the report."""


def verifies_itself(answer: str) -> bool:
    """Whether a response that boxes `answer` gets reward 1. No, if the reward raises: that would end a run.

    The reward's time limit runs by the clock on the wall. What fails is tried again with a longer one, so that a busy
    machine keeps the rows that a quiet one keeps.
    """
    response = f"The answer is $\\boxed{{{answer}}}$."
    try:
        return (
            math_verify("", response, answer) == 1.0
            or math_verify_within(PATIENCE, response, answer) == 1.0
        )
    except Exception:  # whatever sympy and its parsers raise on a text they did not foresee
        return False


def problem_text(value: Any) -> str:
    """The problem of a text, or of chat messages (the last user message). Raises `RowError`."""
    if isinstance(value, list):
        texts = [
            m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"
        ]
        value = texts[-1] if texts else None
    if not isinstance(value, str) or not value.strip():
        raise RowError("no problem text")
    text = unicodedata.normalize("NFC", value).strip()
    return text.removesuffix(INSTRUCTION).rstrip()


_TRANSLATION = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width forms of ASCII
    **dict.fromkeys([0x00A0, 0x2009, 0x202F, 0x3000], " "),
    ord("\N{MINUS SIGN}"): "-",
    ord("\N{MULTIPLICATION SIGN}"): "\\times ",
    ord("\N{MIDDLE DOT}"): "\\cdot ",
    ord("\N{GREEK SMALL LETTER PI}"): "\\pi ",
    ord("\N{INFINITY}"): "\\infty ",
    ord("\N{DEGREE SIGN}"): "^\\circ ",
    ord("\N{LESS-THAN OR EQUAL TO}"): "\\le ",
    ord("\N{GREATER-THAN OR EQUAL TO}"): "\\ge ",
    ord("\N{UNION}"): "\\cup ",
}
_ROOT = re.compile("\N{SQUARE ROOT} ?([0-9]+|[a-z])")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_GSM8K = re.compile(r"#### (-?[0-9.,]+)$")
_BETWEEN_BOXES = re.compile(r"(?:[\s,;$]|\\[,;()]|\\text\{[\s,]*(?:and|or)[\s,]*\}|and|or)*")


def answer_text(value: Any) -> str:
    """A reference answer as LaTeX for one box: the last boxed answer if there is one, without $ and final period.

    Takes text, numbers, a list of answers, verl's `reward_model`, or a solution of GSM8K (`#### 1,200`). Unicode
    operators become LaTeX, which math-verify reads. Raises `RowError`.
    """
    if isinstance(value, Mapping):
        value = value.get("ground_truth")
    if isinstance(value, (list, tuple)):
        return ", ".join(answer_text(item) for item in value) if value else answer_text(None)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value != value:
        raise RowError("no reference answer")
    text = " ".join(unicodedata.normalize("NFC", str(value)).translate(_TRANSLATION).split())
    if match := _GSM8K.search(text):
        text = match[1].replace(",", "")
    text = _unwrapped(_ROOT.sub(r"\\sqrt{\1}", text))
    if not text:
        raise RowError("no reference answer")
    if len(text) > LONGEST_ANSWER:
        raise RowError(f"reference answer longer than {LONGEST_ANSWER} characters")
    if _closing_brace(text + "}", 0) != len(text):
        raise RowError("unbalanced braces in the reference answer")
    return text


def last_boxed(text: str) -> str:
    r"""The contents of the last `\boxed{}`, or of the last few if only commas, "and", "or" part them, joined by commas.

    Text without a box comes back as it is, and so does one whose last box never closes.
    """
    boxes: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        if boxes and match.start() < boxes[-1][1]:  # a box in a box
            continue
        end = _closing_brace(text, match.end())
        if end is None:
            return text
        boxes.append((match.start(), end + 1, text[match.end() : end]))
    if not boxes:
        return text
    contents = [boxes[-1][2]]
    for before, after in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        if not _BETWEEN_BOXES.fullmatch(text[before[1] : after[0]]):
            break
        contents.append(before[2])
    return ", ".join(content.strip() for content in reversed(contents))


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _unwrapped(text: str) -> str:
    """`text` out of its box, its math delimiters, and without the period behind it."""
    while True:
        before = text
        text = re.sub(r"(?<!\\)\$", "", last_boxed(text)).strip()
        if text.endswith(".") and not text.endswith("..."):
            text = text[:-1]
        for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(opening) and text.find(closing) == len(text) - len(closing):
                text = text[len(opening) : -len(closing)]
        if text == before:
            return text


_LATEX_SPACING = re.compile(r"\\(?:left|right|quad|qquad|displaystyle)(?![a-zA-Z])|\\[,;:! ]")
_NOT_CONTENT = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w+\-*/^=<>!|.]|_")


def problem_key(problem: str) -> bytes:
    """16 bytes that are equal for problems that differ in case, spacing, punctuation or LaTeX dress only.

    NFKC and case folding, `\\dfrac` and `\\tfrac` as `\\frac`, then only letters, digits, decimal points and operators.
    Problems that differ in braces alone collide, which does no harm if rows are left out of training.
    """
    text = unicodedata.normalize("NFKC", problem).casefold().replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    text = _NOT_CONTENT.sub("", _LATEX_SPACING.sub("", text))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
