"""The environment of the proof `turn_costs`: answers of a given length, to a given number of turns."""

from __future__ import annotations

from typing import Any


def answer(messages: list[dict[str, Any]], extra_info: dict[str, Any], **_: Any) -> Any:
    turns = sum(message["role"] == "assistant" for message in messages)
    reply = "x" * extra_info.get("characters", 1) if turns < extra_info.get("turns", 1) else None
    return {"reply": reply, "reward": float(len(messages[-1]["content"]) % 3)}
