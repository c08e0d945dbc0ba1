"""What an environment says to a conversation: messages to append, or the end, and perhaps a reward.

A function may return any of these, and `reply_of` reads them:

    None                               the conversation ends
    "text"                             a message of the user
    {"role": ..., "content": ...}      a message of any role that the chat template has
    [one of the two above, ...]        several, such as the answers to several calls in one turn
    {"reply": one of all above, "reward": 0.5}

A reply is plain data, because it comes from a worker process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qarl.turns.conversation import Message

KEYS = ("reply", "reward")
"""The keys of a reply with a reward."""
FORMS = (
    "return None to end the conversation, text, a message with role and content, a list of these, or a dict with "
    "reply and reward"
)


class Reply(NamedTuple):
    """`messages`: to append; empty if the conversation ends. `reward`: of the last turn, or None."""

    messages: list[Message]
    reward: float | None = None


def reply_of(result: Any) -> Reply:
    """Return the reply in the `result` of an environment. Raise ValueError, in words, if it has none of the forms."""
    if not isinstance(result, Mapping) or "role" in result:
        return Reply(_messages(result))
    unknown = [key for key in result if key not in KEYS]
    if unknown or not result:
        names = ", ".join(map(str, result)) or "nothing"
        raise ValueError(
            f"a dict has the keys {' and '.join(KEYS)}, or role and content; this has {names}"
        )
    return Reply(_messages(result.get("reply")), result.get("reward"))


def _messages(value: Any) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str | Mapping):
        return [_message(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_message(item) for item in value]
    raise ValueError(f"{type(value).__name__} is no message")


def _message(value: Any) -> Message:
    if isinstance(value, str):
        return {"role": "user", "content": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{type(value).__name__} is no message")
    role = value.get("role")
    content = value.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message has the texts role and content")
    if role == "assistant":
        raise ValueError(
            "a message has the role assistant, which is the model's; a reply is only what comes after the turn, "
            "without the conversation so far"
        )
    return dict(value)


def shortened_messages(messages: Sequence[Message], limit: int, side: str) -> list[Message]:
    """Return the messages with contents of at most `limit` characters and a few that say what was left out.

    `side`: what is left out, left, middle or right. The words are those of verl's `ToolAgentLoop`, so that a
    conversation has the same tokens there."""
    return [
        message | {"content": shortened_text(message["content"], limit, side)}
        for message in messages
    ]


def shortened_text(text: str, limit: int, side: str) -> str:
    """Return `text`, or its ends if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[-limit:]
    if side == "right":
        return text[:limit] + "...(truncated)"
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
