"""Environments of the proofs about turns. They answer every turn, so `multi_turn.max_assistant_turns` ends them."""

from __future__ import annotations

from typing import Any

SHORT = 12
LONG = 640
"""Characters of an answer, each of which is a token of the tiny models."""


def reward(text: str) -> float:
    """Return a reward that differs from turn to turn of any model: the share of distinct characters."""
    return len(set(text)) / max(1, len(text))


def answered(messages: list[dict[str, Any]], length: int) -> dict[str, Any]:
    text = str(messages[-1]["content"])
    number = str(len(text))
    return {
        "reply": {"role": "tool", "content": (number * length)[:length]},
        "reward": reward(text),
    }


def short(messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
    """Answer with 12 digits that depend on the turn."""
    return answered(messages, SHORT)


def long(messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
    """Answer with 640 digits, so that three turns have more than 1,300 tokens."""
    return answered(messages, LONG)
