"""Metrics of conversations. verl's `num_turns` counts the messages of user and model; these count the model's turns."""

from __future__ import annotations

from collections.abc import Sequence

from qarl.turns.conversation import Conversation


def turn_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return metrics of the conversations of a step.

    turns/mean, turns/max    turns of the model in a conversation
    turns/context_tokens     mean tokens of a conversation that the environment appended, with the template's frame
    turns/prefilled_tokens   mean tokens of a conversation that the engine prefills, if its prefix cache has none
    turns/max_turns_frac     share of conversations that ended because the model had no turn left
    turns/failures           calls of the environment that raised, hung or ended their process, a share of all calls
    """
    counts = [len(conversation.turns) for conversation in conversations]
    total = len(conversations)
    prefilled = sum(prefilled_tokens(conversation) for conversation in conversations)
    reasons = [conversation.finish_reason for conversation in conversations]
    return {
        "turns/mean": sum(counts) / total,
        "turns/max": float(max(counts)),
        "turns/context_tokens": sum(each.context_tokens for each in conversations) / total,
        "turns/prefilled_tokens": prefilled / total,
        "turns/max_turns_frac": reasons.count("max_turns") / total,
        "turns/failures": sum(each.failures for each in conversations) / sum(counts),
    }


def prefilled_tokens(conversation: Conversation) -> int:
    """Return the tokens that the engine prefills without a prefix cache: the prompts of all turns, of which a later one
    repeats what came before it, or in a session what is new."""
    prompt = len(conversation.prompt_token_ids)
    if conversation.in_session:
        return prompt + sum(end - start for start, end in conversation.later_prefills)
    return sum(prompt + start for start, _ in conversation.turns)
