"""Environments for tests: they ask the next sum, end after some turns, and fail in every way."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def turns_of(messages: list[dict[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def three_sums(messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
    """Ask another sum twice, and reward a turn that names a 1."""
    turn = turns_of(messages)
    reply = f"{1000 * turn + 11}+{4000 + turn}" if turn < 3 else None
    return {"reply": reply, "reward": float("1" in messages[-1]["content"])}


async def later(messages: list[dict[str, Any]], ground_truth: Any, **_: Any) -> Any:
    """Answer once, asynchronously."""
    await asyncio.sleep(0)
    return ground_truth if turns_of(messages) < 2 else None


def worse(messages: list[dict[str, Any]], **_: Any) -> Any:
    """Fail as the last message says."""
    text = messages[-1]["content"]
    if text == "raise":
        raise ValueError("bad tool")
    if text == "hang":
        time.sleep(600)
    if text == "exit":
        os._exit(3)
    if text == "megabyte":
        return "m" * 10**6
    if text == "number":
        return 42
    if text == "nan":
        return {"reply": None, "reward": float("nan")}
    return None
