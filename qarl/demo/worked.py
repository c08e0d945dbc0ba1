"""Worked answers as token ids: of a single turn, or a conversation with the environment of the task.

The warm start learns the turns of the model, and reads what the environment says between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qarl.demo.tasks import Problem, Task
from qarl.turns.conversation import Conversation, Sampled
from qarl.turns.frame import ChatFrame
from qarl.turns.reply import reply_of


def worked(tokenizer: Any, task: Task, problems: Sequence[Problem]) -> list[Conversation]:
    """Return the worked answer to each problem as a conversation, with its prompt."""
    prompts = [[{"role": "user", "content": task.prompt_text(problem)}] for problem in problems]
    prompt_ids: Any = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=False
    )
    frame = ChatFrame(tokenizer, [tokenizer.eos_token_id]) if task.environment else None
    conversations = []
    for problem, messages, ids in zip(problems, prompts, prompt_ids, strict=True):
        conversation = Conversation(list(ids), [*messages])
        for text in task.turns(problem):
            token_ids = tokenizer(text + tokenizer.eos_token)["input_ids"]
            conversation.add_turn(Sampled(token_ids, [0.0] * len(token_ids), "stop"), text)
            if frame is None:
                continue
            replies = answered(task, problem, conversation)
            if replies:
                context = frame.token_ids(replies, after=tokenizer.eos_token_id)
                conversation.add_context(replies, context)
        conversations.append(conversation)
    return conversations


def answered(task: Task, problem: Problem, conversation: Conversation) -> list[Any]:
    """Return what the environment says to the last turn, and note its reward."""
    assert task.environment is not None
    result = task.environment(
        messages=conversation.messages,
        data_source=task.name,
        ground_truth=task.answer(problem),
        extra_info={},
    )
    reply = reply_of(result)
    if reply.reward is not None:
        conversation.rewards.append(float(reply.reward))
    return reply.messages
