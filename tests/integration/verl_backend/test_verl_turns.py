"""Conversations have the ids and masks that verl's agent loops give them, but where a turn was cut.

verl's builder of continuous tokens gets the same turns and messages (`ToolAgentLoop` calls it so), with a tokenizer of
Qwen's template. A turn that was cut has no end of turn in verl: the next message follows it at once. Ours ends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_tokenizers import TOOL_TEMPLATE, save_chat_tokenizer

from qarl.turns.conversation import Conversation, Message, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.loop import Limits, take
from qarl.turns.reply import Reply

ASKED = [{"role": "user", "content": "17 * 3?"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


SHAPES: dict[str, list[tuple[str, list[Message]]]] = {
    "one turn": [("51", [])],
    "two turns": [("calc 17*3", [user("51")]), ("51", [])],
    "three turns": [("calc 17*3", [user("51")]), ("sure?", [user("yes")]), ("51", [])],
    "an empty turn": [("", [user("?")]), ("51", [])],
    "a tool": [("calc 17*3", [tool("51")]), ("51", [])],
    "several calls": [("calc calc", [tool("51"), tool("7")]), ("51", [])],
    "an empty answer": [("calc", [tool("")]), ("51", [])],
    "white space": [("calc ", [user("\n 51 \n")]), (" 51", [])],
    "special text": [("don't", [user("na\u00efve \u4f60")]), ("51", [])],
    "cut in an answer": [("calc 17*3", [user("51 " * 120)]), ("51", [])],
}


@pytest.mark.parametrize("name", SHAPES)
def test_verl_has_the_same_ids_and_masks(tmp_path: Path, name: str) -> None:
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path))
    tokenizer.chat_template = TOOL_TEMPLATE
    limits = Limits(turns=9, response=300, characters=10_000)
    builder = QwenContinuousTokenBuilder(tokenizer)
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id])
    theirs = builder.build_initial_tokens(ASKED)
    conversation = Conversation([*theirs], [*ASKED])
    prompt, mask, messages = len(theirs), list[int](), [*ASKED]
    for text, replies in SHAPES[name]:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        turn = Sampled(ids, [-1.0] * len(ids), "stop")
        conversation.add_turn(turn, text)
        take(conversation, turn, Reply(replies), frame, limits)
        merged = builder.merge_assistant_tokens(theirs, ids)
        mask, _ = builder.align_response_metadata(merged, mask)
        theirs, before = merged.token_ids, messages
        messages = [*messages, {"role": "assistant", "content": text}, *replies]
        if not replies:
            break
        merged = builder.merge_context_tokens([*before, messages[len(before)]], messages, theirs)
        longer, _ = builder.align_response_metadata(merged, mask)
        if len(longer) >= limits.response:  # as ToolAgentLoop ends
            break
        theirs, mask = merged.token_ids, longer
    assert conversation.token_ids == theirs
    assert conversation.response_token_ids == theirs[prompt:]
    assert [int(sampled) for sampled in conversation.mask] == mask
    assert conversation.finish_reason == ("length" if name == "cut in an answer" else "stop")
    if name == "cut in an answer":
        assert conversation.turns == [(0, len(mask))]
