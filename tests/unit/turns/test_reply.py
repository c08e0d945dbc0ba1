"""The forms of a reply, and of what is none."""

from __future__ import annotations

from typing import Any

import pytest

from qarl.turns.reply import Reply, reply_of, shortened_messages, shortened_text

USER = {"role": "user", "content": "42"}
TOOL = {"role": "tool", "content": "7", "tool_call_id": "call00001"}


@pytest.mark.parametrize(
    ("result", "reply"),
    [
        (None, Reply([])),
        ("42", Reply([USER])),
        ("", Reply([{"role": "user", "content": ""}])),
        (TOOL, Reply([TOOL])),
        ([TOOL, "42"], Reply([TOOL, USER])),
        ((), Reply([])),
        ({"reply": "42", "reward": 0.5}, Reply([USER], 0.5)),
        ({"reply": None, "reward": 1}, Reply([], 1)),
        ({"reward": 1}, Reply([], 1)),
        ({"reply": [TOOL, TOOL]}, Reply([TOOL, TOOL])),
    ],
)
def test_forms(result: Any, reply: Reply) -> None:
    assert reply_of(result) == reply


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (42, "int is no message"),
        (b"42", "bytes is no message"),
        ([42], "int is no message"),
        ({}, "this has nothing"),
        ({"text": "42"}, "this has text"),
        ({"reply": "42", "rewards": 1}, "this has reply, rewards"),
        ({"role": "tool"}, "role and content"),
        ({"role": "tool", "content": 42}, "role and content"),
        ({"role": "assistant", "content": "42"}, "only what comes after the turn"),
        ({"reply": {"reply": "42"}}, "role and content"),
    ],
)
def test_what_is_no_reply(result: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reply_of(result)


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)...efgh"),
        ("right", "abcd...(truncated)"),
        ("middle", "ab...(truncated)...gh"),
    ],
)
def test_a_long_message_is_cut(side: str, text: str) -> None:
    assert shortened_text("abcdefgh", 4, side) == text
    assert shortened_text("abcd", 4, side) == "abcd"
    megabyte = shortened_messages([{"role": "tool", "content": "x" * 10**6}], 256, side)
    assert len(megabyte[0]["content"]) < 300


def test_a_limit_of_one_keeps_nothing() -> None:
    """verl's `text[-0:]` is the whole message."""
    assert shortened_text("abcdefgh", 1, "middle") == "...(truncated)..."
