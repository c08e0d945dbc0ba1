"""Tools that a model calls in Hermes' format, for verl's loop of tools and as an environment: the same conversations.

`answer` is the environment. It reads calls and words errors as verl's `ToolAgentLoop` does, at most two in a turn."""

from __future__ import annotations

import json
import re
from typing import Any

PARALLEL = 2
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def product(left: int, right: int) -> str:
    """Multiply.

    Args:
        left: a number
        right: another
    """
    return str(left * right)


def broken() -> str:
    """Raise."""
    raise ValueError("no such sum")


def silent() -> str:
    """Say nothing."""
    return ""


def megabyte() -> str:
    """Say too much."""
    return "0123456789" * 100_000


def letters() -> str:
    """Speak in several scripts."""
    return "na\u00efve \u4f60\u597d \U0001f600\n"


TOOLS = {tool.__name__: tool for tool in (product, broken, silent, megabyte, letters)}


def called(text: str) -> str:
    """Answer one call."""
    call = json.loads(text)
    name = call["name"]
    try:
        return str(TOOLS[name](**call["arguments"]))
    except Exception as error:
        return f"Error executing tool '{name}': {error}"


def answer(messages: list[dict[str, Any]], **_: Any) -> Any:
    """Answer the calls of the last turn. A turn without one ends the conversation."""
    calls = _CALL.findall(messages[-1]["content"])[:PARALLEL]
    return [{"role": "tool", "content": called(call)} for call in calls] or None


def length_reward(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    """A reward that differs between the conversations, by text and turns."""
    return len(solution_str) / 1000 + extra_info["num_turns"]
