"""Tries `rollout.environment` once before a run: it answers an empty turn, and the chat template takes the answer."""

from __future__ import annotations

from qarl.checks.check import Check
from qarl.config import Config
from qarl.data.prompts import PromptDataset
from qarl.errors import UserError
from qarl.rollout.turns import Conversations
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.loop import Failure

_ANY = {"role": "user", "content": "?"}
"""A message to render if the environment ends the conversation at once."""


def answers_a_turn(
    config: Config, conversations: Conversations | None, train_prompts: PromptDataset
) -> None:
    """Call the environment after an empty turn. Raise UserError if it raises, hangs or returns what is no reply, or if
    the chat template refuses the reply."""
    if conversations is None:
        return
    prompt = train_prompts[0]
    conversation = Conversation(prompt.prompt_token_ids, [*prompt.messages])
    conversation.add_turn(Sampled([], [], "stop"), "")
    (reply,) = conversations.environment.respond([(prompt, conversation)])
    if isinstance(reply, Failure):
        raise UserError(
            "the environment fails on an empty turn",
            where=f"rollout.environment={config.rollout.environment}, row {prompt.index}",
            why=reply.why,
            fix="let it answer any text of the model, also an empty or garbled one",
        )
    conversations.frame.token_ids(reply.messages or [_ANY], after=None)


CHECKS = (Check("data", "the environment answers a turn", answers_a_turn),)
