"""A conversation as token ids: a prompt, then turns of the model with contexts between them.

A turn is what the model sampled in one call of the engine. A context is what an environment appended after a turn, in
the chat template's own frame. The response is everything after the prompt, in verl's words, so a response of several
turns fits wherever one of a single turn does, with a mask that is true at the model's tokens:

    prompt    response
              turn      context   turn
    p p p     m m m m   c c c     m m         m: sampled, in the loss; c: neither
    mask      1 1 1 1   0 0 0     1 1

Sampled ids are kept and never encoded again, because text does not say which ids it came from. So the prompt of the
next turn is the ids so far, and only the context is encoded (`qarl.turns.frame`). verl's agent loops do the same
(`response_mask`), and so does TRL (`tool_mask`).

Log-probs at a context are 0. They are never read, and a sum over a row is that of its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A message of a chat: its `role` and its `content`, and whatever else the chat template reads."""


class Span(NamedTuple):
    """A turn's tokens in its response: from `start` up to, not including, `end`."""

    start: int
    end: int


class Sampled(NamedTuple):
    """What the engine returns for a turn. `finish_reason`: in vLLM's words; "stop" if the model ended it."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass
class Conversation:
    """A conversation while it is held, and at its end.

    prompt_token_ids    of the first turn
    messages            the same as a chat: those of the prompt, then the model's turns and the environment's messages
    response_token_ids  all tokens after the prompt
    log_probs           one for each of them, 0 at contexts
    turns               the span of each turn in the response
    rewards             those that the environment gave
    failures            number of calls of the environment that raised, hung or ended their process
    finish_reason       why it ended: "stop" if the environment ended it, "length" at a limit of tokens, "max_turns"
    in_session          whether the engine keeps keys and values from turn to turn; otherwise it prefills each turn's
                        whole prompt
    """

    prompt_token_ids: list[int]
    messages: list[Message] = field(default_factory=list)
    response_token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    failures: int = 0
    finish_reason: str | None = None
    in_session: bool = False

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far: the prompt of the next turn."""
        return self.prompt_token_ids + self.response_token_ids

    @property
    def mask(self) -> list[bool]:
        """Whether the model sampled each token of the response."""
        return mask_of(self.turns, len(self.response_token_ids))

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the response that the model did not sample."""
        return len(self.response_token_ids) - sum(end - start for start, end in self.turns)

    @property
    def later_prefills(self) -> tuple[Span, ...]:
        """Start and end, in the row of prompt and response, of what is new in the prompt of each later turn of a
        session: a turn's last token, which the engine sampled and did not compute, and the context behind it."""
        return later_prefills(len(self.prompt_token_ids), self.turns)

    def add_turn(self, sampled: Sampled, text: str) -> None:
        """Append a turn of the model. `text`: what its tokens say."""
        start = len(self.response_token_ids)
        self.turns.append(Span(start, start + len(sampled.token_ids)))
        self.response_token_ids += sampled.token_ids
        self.log_probs += sampled.log_probs
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, messages: Sequence[Message], token_ids: Sequence[int]) -> None:
        """Append messages of the environment, as the token ids of the chat template's frame."""
        self.response_token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)
        self.messages += messages


def later_prefills(prompt: int, turns: Iterable[Span]) -> tuple[Span, ...]:
    """Return `Conversation.later_prefills` of `turns` behind `prompt` tokens."""
    return tuple(
        Span(prompt + before.end - 1, prompt + after.start) for before, after in pairwise(turns)
    )


def mask_of(turns: Iterable[Span], length: int) -> list[bool]:
    """Return the mask of a response of `length` tokens: True within the `turns`."""
    mask = [False] * length
    for start, end in turns:
        mask[start:end] = [True] * (end - start)
    return mask


def spans_of(mask: Iterable[object]) -> list[Span]:
    """Return the turns of a mask, the inverse of `mask_of`, as of verl's `response_mask` or TRL's `env_mask`.

    Turns without a context between them, and turns without tokens, cannot be told from a mask."""
    spans = []
    start = None
    position = 0
    for position, sampled in enumerate([*mask, False]):
        if sampled and start is None:
            start = position
        elif not sampled and start is not None:
            spans.append(Span(start, position))
            start = None
    return spans
