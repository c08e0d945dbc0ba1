"""Turns, contexts and masks of a conversation, by hand."""

from __future__ import annotations

from random import Random

import pytest

from qarl.turns.conversation import Conversation, Sampled, Span, mask_of, spans_of
from qarl.turns.metrics import prefilled_tokens, turn_metrics


def held() -> Conversation:
    """Prompt 1 2, turn 3 4, context 5 6 7, turn 8."""
    conversation = Conversation([1, 2], [{"role": "user", "content": "?"}])
    conversation.add_turn(Sampled([3, 4], [-0.5, -1.0], "stop"), "a call")
    conversation.add_context([{"role": "user", "content": "42"}], [5, 6, 7])
    conversation.add_turn(Sampled([8], [-0.25], "stop"), "42")
    return conversation


def test_a_conversation_of_two_turns() -> None:
    conversation = held()
    assert conversation.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert conversation.response_token_ids == [3, 4, 5, 6, 7, 8]
    assert conversation.turns == [Span(0, 2), Span(5, 6)]
    assert conversation.mask == [True, True, False, False, False, True]
    assert conversation.log_probs == [-0.5, -1.0, 0.0, 0.0, 0.0, -0.25]
    assert conversation.context_tokens == 3
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]


def test_what_an_engine_prefills_that_keeps_keys_and_values() -> None:
    """The last token of a turn was sampled and not computed, so it comes with the context: 4 5 6 7, from place 3."""
    session = held()
    session.in_session = True
    assert session.later_prefills == (Span(3, 7),)
    assert (prefilled_tokens(session), prefilled_tokens(held())) == (6, 9)
    assert Conversation([1]).later_prefills == ()


def test_metrics() -> None:
    """The second conversation has one turn, which failed. Prompts: 2 and 2 + 5, and 3."""
    short = Conversation([1, 2, 3], failures=1, finish_reason="max_turns")
    short.add_turn(Sampled([4], [-1.0], "stop"), "")
    metrics = turn_metrics([held(), short])
    assert metrics == {
        "turns/mean": 1.5,
        "turns/max": 2.0,
        "turns/context_tokens": 1.5,
        "turns/prefilled_tokens": 6.0,
        "turns/max_turns_frac": 0.5,
        "turns/failures": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([], []),
        ([0, 0], []),
        ([1, 1], [(0, 2)]),
        ([1, 1, 0, 1], [(0, 2), (3, 4)]),
        ([0, 1, 0, 0, 1, 1, 0], [(1, 2), (4, 6)]),
    ],
)
def test_the_turns_of_a_mask(mask: list[int], spans: list[tuple[int, int]]) -> None:
    assert spans_of(mask) == spans
    assert mask_of(spans_of(mask), len(mask)) == [bool(sampled) for sampled in mask]


def test_masks_and_turns_are_inverse() -> None:
    rng = Random(0)
    for _ in range(200):
        mask = [rng.random() < 0.6 for _ in range(rng.randrange(20))]
        assert mask_of(spans_of(mask), len(mask)) == mask
