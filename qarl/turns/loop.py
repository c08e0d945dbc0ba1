"""Hold conversations: sample a turn of each, ask the environment, append what it says, until each has ended.

Neither engine nor environment is known here. Both are functions, so that every backend with an engine that samples many
prompts at once can call `hold`. The turns of all conversations that go on are sampled together. What is sampled
depends on a conversation alone, not on the others, if the engine keeps rows apart and each turn has its own seed
(`turn_seed`).

A conversation ends

    stop        the environment said so, after a turn that the model had ended itself
    length      its last turn was cut by a limit of tokens, or no token of the model would fit behind the next context.
                That context is left out, as in verl and TRL: a response ends with a token that the model sampled
    max_turns   the model has had `turns` turns

The environment sees every turn, the last one too, because it may give a reward for it. What it says is then left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.reply import Reply, shortened_messages


@dataclass(frozen=True)
class Limits:
    """`turns`: of the model in a conversation. `response`: tokens after the prompt. `turn`: tokens of a turn, or None.
    `characters`, `side`: of a message of the environment (`qarl.turns.reply.shortened_messages`)."""

    turns: int
    response: int
    turn: int | None = None
    characters: int = 256
    side: str = "middle"


class Failure(NamedTuple):
    """A call of the environment without a reply. `told`: what the model is told. `why`: for the log."""

    told: str
    why: str


class Request(NamedTuple):
    """A turn to sample: of the conversation `row`, its number from 0, its prompt, and the most tokens that fit."""

    row: int
    turn: int
    token_ids: list[int]
    max_tokens: int


Generate = Callable[[Sequence[Request]], Sequence[Sampled]]
Respond = Callable[[Sequence[tuple[int, Conversation]]], Sequence[Reply | Failure]]
"""Row and conversation of each that has had a turn -> what the environment says."""
Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]


def turn_seed(seed: int, turn: int) -> int:
    """Return the sampling seed of a turn. That of the first is `seed`, so that a single turn is sampled as without an
    environment."""
    if not turn:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def hold(
    conversations: Sequence[tuple[int, Conversation]],
    *,
    generate: Generate,
    respond: Respond,
    decode: Decode,
    frame: ChatFrame,
    limits: Limits,
) -> None:
    """Hold `conversations`, which have a prompt and no turn yet, to their ends. Each has a number, its row."""
    going_on = list(conversations)
    while going_on:
        requests = [request(row, conversation, limits) for row, conversation in going_on]
        sampled = generate(requests)
        texts = decode([turn.token_ids for turn in sampled])
        for (_, conversation), turn, text in zip(going_on, sampled, texts, strict=True):
            conversation.add_turn(turn, text)
        replies = respond(going_on)
        for (_, conversation), turn, reply in zip(going_on, sampled, replies, strict=True):
            take(conversation, turn, reply, frame, limits)
        going_on = [(row, each) for row, each in going_on if each.finish_reason is None]


def request(row: int, conversation: Conversation, limits: Limits) -> Request:
    """Return the request for the next turn of a conversation."""
    left = limits.response - len(conversation.response_token_ids)
    most = left if limits.turn is None else min(left, limits.turn)
    return Request(row, len(conversation.turns), conversation.token_ids, most)


def take(
    conversation: Conversation,
    turn: Sampled,
    reply: Reply | Failure,
    frame: ChatFrame,
    limits: Limits,
) -> None:
    """Append what the environment says to the last turn, or end the conversation."""
    if isinstance(reply, Failure):
        conversation.failures += 1
        reply = Reply([{"role": "user", "content": reply.told}])
    if reply.reward is not None:
        conversation.rewards.append(reply.reward)
    full = len(conversation.response_token_ids) >= limits.response
    if not reply.messages:
        conversation.finish_reason = turn.finish_reason  # "length" if the model's last turn was cut
    elif full:
        conversation.finish_reason = "length"
    elif len(conversation.turns) >= limits.turns:
        conversation.finish_reason = "max_turns"
    else:
        messages = shortened_messages(reply.messages, limits.characters, limits.side)
        last = turn.token_ids[-1] if turn.token_ids else None
        ids = frame.token_ids(messages, after=last)
        if len(conversation.response_token_ids) + len(ids) >= limits.response:
            conversation.finish_reason = "length"
        else:
            conversation.add_context(messages, ids)
