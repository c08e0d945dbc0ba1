"""An environment that is a callable, called in the trainer's process (`QaRLTrainer(environment=...)`).

A closure or a notebook's function cannot be sent to a worker process. Its calls have the time limit of
`qarl.trl.time_limit`, and fail as those of an environment by name do (`qarl.data.environments`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from qarl.data.environment_outcomes import failure_of, outcome_of
from qarl.data.environments import arguments
from qarl.data.prompts import Prompt
from qarl.data.reward_outcomes import Refused
from qarl.errors import UserError, shortened
from qarl.trl.time_limit import OwnLoop, TooLong, gathered, time_limit
from qarl.turns.conversation import Conversation
from qarl.turns.loop import Failure
from qarl.turns.reply import Reply


class InProcess:
    """The environment `function`, sync or async. `timeout_s`: limit of a call, or None."""

    def __init__(self, function: Callable[..., Any], *, timeout_s: float | None) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._loop: OwnLoop | None = None

    def stop(self) -> None:
        """No call goes on behind `respond`."""

    def respond(self, held: Sequence[tuple[Prompt, Conversation]]) -> list[Reply | Failure]:
        """Return what the environment says to the last turn of each conversation, which began with the prompt.

        Raise UserError if the function returns what is no reply."""
        results = [self._called(arguments(*pair)) for pair in held]
        waiting = [row for row, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            self._loop = self._loop or OwnLoop()
            coroutines = [_awaited(results[row]) for row in waiting]
            awaited = gathered(self._loop, coroutines, self._timeout_s)
            for row, result in zip(waiting, awaited, strict=True):
                results[row] = result
        return [self._reply(*pair, result) for pair, result in zip(held, results, strict=True)]

    def _called(self, given: dict[str, Any]) -> Any:
        """Return the result of a call, which may be awaitable, or its exception."""
        try:
            with time_limit(self._timeout_s):
                return self._function(**given)
        except (Exception, SystemExit, TooLong) as error:
            return error

    def _reply(self, prompt: Prompt, conversation: Conversation, result: Any) -> Reply | Failure:
        if isinstance(result, TooLong):
            told = f"took longer than {self._timeout_s:g} seconds"
            return Failure(f"Error: the call {told}", told)
        if isinstance(result, BaseException):
            return failure_of(result)
        outcome = outcome_of(result)
        if not isinstance(outcome, Refused):
            return outcome
        raise UserError(
            f"the environment {name_of(self._function)} {outcome.what}",
            where=f"row {prompt.index} of a rollout",
            why=f"{outcome.why} (turn: {shortened(conversation.messages[-1]['content'])})",
            fix=outcome.fix,
        )


async def _awaited(result: Any) -> Any:
    return await result


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
