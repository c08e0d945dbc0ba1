"""Environments by name, in the worker processes that rewards have.

An environment answers a turn of the model. It is a function of the user:

    def environment(messages: list[dict], data_source: str, ground_truth: Any, extra_info: dict | None) -> reply

`messages` is the whole conversation, whose last message is the turn to answer; the other arguments are those of a
reward. `qarl.turns.reply` has the forms of a reply. Arguments are passed by keyword, and the function may be async.
Calls for one conversation may reach different processes, so it keeps nothing between calls: what it needs to know is in
its arguments. So the same run is the same again, also after a resume.

A call that raises, hangs or ends its process is told to the model as an answer, because a model may bring a tool to any
of these, and one conversation must not end a run. verl and TRL answer exceptions so. A result that is no reply ends the
run: it is an error of the function, not of a tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from qarl.data.prompts import Prompt
from qarl.data.reward_outcomes import Lost, Refused
from qarl.data.reward_workers import WorkerFunction
from qarl.data.worker_roles import ENVIRONMENT
from qarl.errors import UserError, shortened
from qarl.turns.conversation import Conversation
from qarl.turns.loop import Failure
from qarl.turns.reply import Reply


class Environment:
    """The environment `spec` (`rollout.environment`) in up to `workers` processes.

    `timeout_s`: limit of a call in seconds, or None. `folder`: where the processes work; None: the current folder."""

    def __init__(
        self, spec: str, *, workers: int, timeout_s: float | None, folder: str | None = None
    ) -> None:
        self._function = WorkerFunction(spec, workers, folder, role=ENVIRONMENT)
        self._timeout_s = timeout_s

    def load(self) -> None:
        """Load the function now. Raise UserError if that fails."""
        self._function.load()

    def stop(self) -> None:
        """End all calls and their processes. A later call starts them again."""
        self._function.stop()

    def respond(self, held: Sequence[tuple[Prompt, Conversation]]) -> list[Reply | Failure]:
        """Return what the environment says to the last turn of each conversation, which began with the prompt.

        Raise UserError if the function cannot be loaded, or returns what is no reply."""
        calls = [
            self._function.submit(arguments(prompt, conversation), self._timeout_s)
            for prompt, conversation in held
        ]
        try:
            return [
                self._reply(prompt, conversation, call.result())
                for (prompt, conversation), call in zip(held, calls, strict=True)
            ]
        except BaseException:
            self.stop()
            raise

    async def answer(self, prompt: Prompt, conversation: Conversation) -> Reply | Failure:
        """Do the same for one conversation, without blocking the event loop."""
        call = self._function.submit(arguments(prompt, conversation), self._timeout_s)
        return self._reply(prompt, conversation, await asyncio.wrap_future(call))

    def _reply(self, prompt: Prompt, conversation: Conversation, outcome: Any) -> Reply | Failure:
        if isinstance(outcome, Reply | Failure):
            return outcome
        assert isinstance(outcome, Refused)
        if isinstance(outcome, Lost):
            return Failure(f"Error: the call {outcome.what}", f"{outcome.what}: {outcome.why}")
        raise UserError(
            f"{ENVIRONMENT.noun} {self._function.name} {outcome.what}",
            where=f"row {prompt.index}, data_source {prompt.data_source!r}",
            why=f"{outcome.why} (turn: {shortened(conversation.messages[-1]['content'])})",
            fix=outcome.fix,
        )


def arguments(prompt: Prompt, conversation: Conversation) -> dict[str, Any]:
    """Return the arguments of a call."""
    return {
        "messages": conversation.messages,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }
