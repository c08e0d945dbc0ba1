"""Ten shapes of conversations, each with its ids, mask and end worked by hand.

The engine is a list of turns and the environment a list of replies. A token is a letter, and the template writes
`]` at the end of a turn, then `u`, the message and `a`. The answer 7
is `]u7a`, or `u7a` behind a turn that ended itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from qarl.turns.conversation import Conversation, Message, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.loop import Failure, Limits, Request, hold, turn_seed
from qarl.turns.reply import Reply

Said = Reply | Failure
SEVEN = Reply([{"role": "user", "content": "7"}])
END = Reply([])


class Letters:
    """A tokenizer of one token a letter, and a chat template."""

    name_or_path = "letters"

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        parts = [
            f"{m['content']}]" if m["role"] == "assistant" else f"u{m['content']}" for m in messages
        ]
        return "".join(parts) + "a" * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Shape(NamedTuple):
    """turns: what the model samples; one without `]` was cut. replies: of the environment. response, mask: expected."""

    turns: list[str]
    replies: list[Said]
    response: str
    mask: str
    finish: str
    rewards: list[float] = []  # noqa: RUF012  never changed
    failures: int = 0


SHAPES = {
    "one turn": Shape(["xy]"], [END], "xy]", "111", "stop"),
    "two turns": Shape(["x]", "yz]"], [SEVEN, END], "x]u7ayz]", "11000111", "stop"),
    "three turns, a reward each": Shape(
        ["x]", "y]", "z]"],
        [Reply(SEVEN.messages, 0.5), Reply(SEVEN.messages, -1.0), Reply([], 2.0)],
        "x]u7ay]u7az]",
        "110001100011",
        "stop",
        [0.5, -1.0, 2.0],
    ),
    "a reward of nothing is one": Shape(
        ["x]", "y]"],
        [Reply(SEVEN.messages, 0.0), Reply([], -0.0)],
        "x]u7ay]",
        "1100011",
        "stop",
        [0.0, 0.0],
    ),
    "two answers to one turn": Shape(
        ["xx]", "y]"], [Reply(SEVEN.messages * 2), END], "xx]u7u7ay]", "1110000011", "stop"
    ),
    "a turn at its own limit is ended by the frame": Shape(
        ["xxxxx", "y]"], [SEVEN, END], "xxxxx]u7ay]", "11111000011", "stop"
    ),
    "the last turn is cut": Shape(
        ["x]", "yyyyy"], [SEVEN, END], "x]u7ayyyyy", "1100011111", "length"
    ),
    "cut in the environment's answer": Shape(
        ["xxx]", "yyy]"], [SEVEN, SEVEN], "xxx]u7ayyy]", "11110001111", "length"
    ),
    "no turn is left": Shape(
        ["x]"] * 4, [SEVEN] * 4, "x]u7a" * 3 + "x]", "11000" * 3 + "11", "max_turns"
    ),
    "a tool fails, and the model is told": Shape(
        ["x]", "y]"], [Failure("E", "raised"), END], "x]uEay]", "1100011", "stop", [], 1
    ),
    "a megabyte is cut": Shape(
        ["x]", "y]"],
        [Reply([{"role": "tool", "content": "m" * 10**6}]), END],
        "x]umm...(truncated)...mmay]",
        "11" + "0" * 23 + "11",
        "stop",
    ),
}
LIMITS = {
    "cut in the environment's answer": Limits(4, 14, 5, 4),
    "no turn is left": Limits(4, 40, 5, 4),
    "the last turn is cut": Limits(4, 10, 5, 4),
}


def held(shapes: Sequence[Shape], limits: Sequence[Limits]) -> list[Conversation]:
    """Hold one conversation for each shape, alone."""
    conversations = []
    for shape, limit in zip(shapes, limits, strict=True):
        conversation = Conversation([ord("p")])
        hold_together([conversation], [shape], limit)
        conversations.append(conversation)
    return conversations


def hold_together(
    conversations: list[Conversation], shapes: Sequence[Shape], limits: Limits
) -> list[Request]:
    seen: list[Request] = []

    def generate(requests: Sequence[Request]) -> list[Sampled]:
        seen.extend(requests)
        answers = []
        for request in requests:
            text = shapes[request.row].turns[request.turn]
            assert len(text) <= request.max_tokens
            cut = not text.endswith("]")
            assert cut <= (len(text) == request.max_tokens)
            reason = "length" if cut else "stop"
            answers.append(Sampled([ord(letter) for letter in text], [-1.0] * len(text), reason))
        return answers

    def respond(pairs: Sequence[tuple[int, Conversation]]) -> list[Said]:
        return [shapes[index].replies[len(each.turns) - 1] for index, each in pairs]

    tokenizer: Any = Letters()
    hold(
        list(enumerate(conversations)),
        generate=generate,
        respond=respond,
        decode=lambda turns: [letters(turn) for turn in turns],
        frame=ChatFrame(tokenizer, [ord("]")]),
        limits=limits,
    )
    return seen


def check(conversation: Conversation, shape: Shape) -> None:
    assert letters(conversation.response_token_ids) == shape.response
    assert "".join(str(int(sampled)) for sampled in conversation.mask) == shape.mask
    sampled = "".join(
        letter for letter, flag in zip(shape.response, shape.mask, strict=True) if flag == "1"
    )
    assert sampled == "".join(shape.turns[: len(conversation.turns)])
    assert conversation.log_probs == [-float(flag) for flag in shape.mask]
    assert conversation.finish_reason == shape.finish
    assert conversation.rewards == shape.rewards
    assert conversation.failures == shape.failures


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    shape = SHAPES[name]
    (conversation,) = held([shape], [LIMITS.get(name, Limits(4, 40, 5, 4))])
    check(conversation, shape)


def test_conversations_that_go_on_are_sampled_together() -> None:
    names = [name for name in SHAPES if name not in LIMITS]
    shapes = [SHAPES[name] for name in names]
    conversations = [Conversation([ord("p")]) for _ in shapes]
    requests = hold_together(conversations, shapes, Limits(4, 40, 5, 4))
    for conversation, shape in zip(conversations, shapes, strict=True):
        check(conversation, shape)
    assert [request.turn for request in requests] == sorted(request.turn for request in requests)
    second = next(request for request in requests if request.row == 1 and request.turn == 1)
    assert letters(second.token_ids) == "px]u7a"
    assert second.max_tokens == 5


def test_a_context_that_leaves_one_token() -> None:
    """With 13 tokens in all, a turn of 4, a context of 3 and a turn of 4, a next context of 3 does not fit; 1 does."""
    shape = Shape(["xxx]", "y"], [SEVEN, END], "xxx]u7ay", "11110001", "length")
    (conversation,) = held([shape], [Limits(4, 8, 5, 4)])
    check(conversation, shape)
    full = Shape(["xxx]"], [SEVEN], "xxx]", "1111", "length")
    (conversation,) = held([full], [Limits(4, 7, 5, 4)])
    check(conversation, full)


def test_seeds() -> None:
    """The first turn is sampled as without an environment. All others differ."""
    assert turn_seed(5, 0) == 5
    seeds = {turn_seed(seed, turn) for seed in range(50) for turn in range(10)}
    assert len(seeds) == 500
    assert max(seeds) < 2**62
