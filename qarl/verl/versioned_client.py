"""verl's client of rollout servers whose answers span publishes, with the version of each token.

`FullyAsyncLLMServerClient` asks again when a publish has interrupted an answer, and joins the parts (verl 0.9.1,
workers/rollout/llm_server.py). It keeps the first and the last version. `VersionedClient` notes every part's: the
server gives it the version of the last publish that its engine has completed (`global_steps`). A part is of one
version, because verl interrupts all requests before a publish and takes none until it is complete.

The class between verl's two is where `super().generate` of the first one looks next.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from qarl.errors import UserError
from qarl.verl.versions import VERSIONS, expanded, run_lengths

_parts: ContextVar[list[tuple[int, int]] | None] = ContextVar("parts", default=None)
"""Version and number of tokens of each part of the answer that this task waits for."""


class _Parts(LLMServerClient):
    """Notes the parts of an answer."""

    async def generate(self, request_id: Any, **arguments: Any) -> Any:
        output = await super().generate(request_id, **arguments)
        parts = _parts.get()
        if parts is not None and output.token_ids:
            parts.append((_version(output), len(output.token_ids)))
        return output


class VersionedClient(FullyAsyncLLMServerClient, _Parts):
    """The client. The answers' `extra_fields` have `VERSIONS`."""

    async def generate(self, request_id: Any, **arguments: Any) -> Any:
        """Return verl's answer. Raise UserError if the server does not say which version an answer is of."""
        parts: list[tuple[int, int]] = []
        token = _parts.set(parts)
        try:
            output = await super().generate(request_id, **arguments)
        finally:
            _parts.reset(token)
        output.extra_fields[VERSIONS] = run_lengths(expanded(parts))
        return output


def _version(output: Any) -> int:
    version = output.extra_fields.get("global_steps")
    if version is None:
        raise UserError(
            "a rollout server answered before it had any weights",
            where="global_steps of the server's answer",
            why="no publish to it is complete, so nobody knows what sampled the tokens",
            fix="see the error of the publish",
        )
    return int(version)
