"""The tools of a TRL user, called for the turns that QaRL's engine samples.

TRL calls tools in a loop of its own (`GRPOTrainer._tool_call_loop`), which samples later turns with its own engine from
BF16 weights. So QaRL holds the conversations (`qarl.turns`) and keeps what belongs to TRL: its parser reads the calls
of a turn, its functions and the methods of its environments are called with the parsed arguments, and messages and
errors have its words. What a model reads is the same, and so are the masks, but for these:

time        A call may take `turn_timeout_s` seconds. In TRL, one that hangs ends the run.
exit        SystemExit of a tool is a failure of the call. In TRL it ends the run.
lists       A list is shown as text. TRL takes every list for blocks of content, and templates drop other items.
the end     An answer that leaves no room for another token of the model is left out. TRL keeps it if it just fits,
            with nothing behind it.

Calls of async functions of all conversations run together, and the others one after another, in the main thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl.chat_template_utils import parse_response

from qarl.data.prompts import Prompt
from qarl.trl.time_limit import TooLong, gathered, time_limit
from qarl.turns.conversation import Conversation, Message
from qarl.turns.loop import Failure
from qarl.turns.reply import Reply

_NOT_MADE: Message = {"role": "tool", "content": ""}


@dataclass
class Turn:
    """The calls of a turn, in TRL's order: those that have a result, then those of async functions.

    results     name of a tool and its result, or the exception that the call raised
    waiting     name of an async function and its coroutine
    is_beyond   whether calls were not made because the model has no turn left to read their results
    """

    results: list[tuple[str, Any]] = field(default_factory=list)
    waiting: list[tuple[str, Any]] = field(default_factory=list)
    is_beyond: bool = False


class Tools:
    """Answers turns with the tools of `trainer`, a `GRPOTrainer` whose batch is being sampled.

    `timeout_s`: limit of a call, or None. `turns`: of the model in a conversation; calls of the last one are not made,
    as in TRL. `calls`, `failures`: of the current rollout."""

    def __init__(self, trainer: Any, *, timeout_s: float | None, turns: int) -> None:
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._turns = turns
        self.calls = 0
        self.failures = 0

    def stop(self) -> None:
        """No call goes on behind `respond`."""

    def start(self) -> None:
        """Begin a rollout."""
        self.calls = 0
        self.failures = 0

    def respond(self, held: Sequence[tuple[Prompt, Conversation]]) -> list[Reply | Failure]:
        """Return the answers to the calls of each conversation's last turn; without calls, it ends.

        `held`: prompts whose `index` is their row in the batch."""
        turns = [self._called(prompt.index, conversation) for prompt, conversation in held]
        coroutines = [coroutine for turn in turns for _, coroutine in turn.waiting]
        results = iter(gathered(self._trainer, coroutines, self._timeout_s))
        replies: list[Reply | Failure] = []
        for (_, conversation), turn in zip(held, turns, strict=True):
            turn.results += [(name, next(results)) for name, _ in turn.waiting]
            failed = sum(isinstance(result, BaseException) for _, result in turn.results)
            self.calls += len(turn.results)
            self.failures += failed
            conversation.failures += bool(failed)
            messages = [self._message(*result) for result in turn.results]
            # The end of the conversation says that there was something to answer.
            replies.append(Reply([_NOT_MADE] if turn.is_beyond else messages))
        return replies

    def _called(self, row: int, conversation: Conversation) -> Turn:
        """Call the tools that the last turn of a conversation asks for. Its message becomes what TRL's parser read."""
        message = self._parsed(row, conversation)
        conversation.messages[-1] = message
        turn = Turn()
        calls = message.get("tool_calls") or []
        turn.is_beyond = bool(calls) and len(conversation.turns) >= self._turns
        for call in [] if turn.is_beyond else calls:
            self._call(row, call, turn)
        return turn

    def _parsed(self, row: int, conversation: Conversation) -> Message:
        trainer = self._trainer
        start, end = conversation.turns[-1]
        before = conversation.prompt_token_ids + conversation.response_token_ids[:start]
        ids = conversation.response_token_ids[start:end]
        parsed: Message = parse_response(
            trainer.processing_class, ids, prefix=before, tools=tools_of_row(trainer, row)
        )
        return parsed

    def _call(self, row: int, call: dict[str, Any], turn: Turn) -> None:
        if call["type"] != "function":
            unknown = ValueError(f"Unsupported tool call type: {call['type']}")
            turn.results.append((call.get("name", "unknown"), unknown))
            return
        name, given = call["function"]["name"], call["function"]["arguments"]
        waiting, result = self._result(self._tool(row, name), name, given)
        (turn.waiting if waiting else turn.results).append((name, result))

    def _tool(self, row: int, name: str) -> Callable[..., Any] | None:
        """Return the tool of a row's conversation, which TRL has sorted by kind."""
        trainer = self._trainer
        for tools in (trainer._sync_tool_dicts[row], trainer._async_tool_dicts[row]):
            if name in tools:
                found: Callable[..., Any] = tools[name]
                return found
        return None

    def _result(self, tool: Callable[..., Any] | None, name: str, given: Any) -> tuple[bool, Any]:
        """Return whether a call gave a coroutine, and it or the call's result or exception."""
        try:
            if tool is None:
                raise ValueError(f"Tool {name} not found.")
            with time_limit(self._timeout_s):
                result = tool(**given)
        except (Exception, SystemExit, TooLong) as error:
            return False, error
        return inspect.iscoroutine(result), result

    def _message(self, name: str, result: Any) -> Message:
        return {"role": "tool", "name": name, "content": self._text(result)}

    def _text(self, result: Any) -> str:
        """Return what the model reads. TRL shows an exception as a dict."""
        if isinstance(result, TooLong):
            result = {"error": f"the call took longer than {self._timeout_s:g} seconds"}
        try:
            text = str({"error": str(result)} if isinstance(result, BaseException) else result)
        except Exception as error:  # of the result's own code
            text = str({"error": f"{type(error).__name__} in the result's text"})
        return text.encode(errors="replace").decode()


def tools_of_row(trainer: Any, row: int) -> Any:
    """Return the tools that a row's prompt was rendered with."""
    if trainer.environment_factories is None:
        return trainer.tools
    return trainer._env_tools[trainer._batch_environments[row]]
