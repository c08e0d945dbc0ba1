"""What an engine is asked, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from qarl.errors import UserError
from qarl.turns.conversation import Conversation


@dataclass(frozen=True)
class RolloutBatch:
    """What was sampled. Each list has one entry per response, in the order of the prompts.

    rollout_log_probs  of each token of the response
    finish_reasons     why each response ended, in vLLM's words
    weight_version     that of the weights that were sampled from
    top_token_ids      the likeliest token at each position, if they were asked for
    preemptions        number of times that vLLM freed a response's KV cache for other requests and computed it again
    conversations      the conversation that each response is, if an environment answered; contexts are among the tokens
    routed_experts     the experts that each router chose, in its order: uint8 [tokens - 1, layers, k], for all tokens
                       of prompt and response except the last; int16 if a layer has more than 256 experts. A dense layer
                       has zeros
    """

    prompt_token_ids: list[list[int]]
    response_token_ids: list[list[int]]
    rollout_log_probs: list[list[float]]
    finish_reasons: list[str]
    weight_version: int
    top_token_ids: list[list[int]] | None = None
    preemptions: int = 0
    routed_experts: list[torch.Tensor] | None = None
    conversations: list[Conversation] | None = None

    @property
    def sampled_lengths(self) -> list[int]:
        """The number of tokens of each response that the model sampled."""
        if self.conversations is None:
            return [len(response) for response in self.response_token_ids]
        return [
            len(response) - conversation.context_tokens
            for response, conversation in zip(
                self.response_token_ids, self.conversations, strict=True
            )
        ]

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """Return these responses, in this order. Preemptions are counted for the whole batch, so here they are 0."""
        chosen: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in _LISTS
            if (values := getattr(self, name)) is not None
        }
        return replace(self, preemptions=0, **chosen)

    @classmethod
    def joined(cls, parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Return the responses of all parts, one part after another.

        Raise RuntimeError if the parts were sampled from different weights."""
        if len(versions := {part.weight_version for part in parts}) > 1:
            raise RuntimeError(f"responses were sampled from weights of versions {versions}")
        columns = {name: [getattr(part, name) for part in parts] for name in _LISTS}
        together: dict[str, Any] = {
            name: [*chain(*column)]
            for name, column in columns.items()
            if not any(values is None for values in column)
        }
        together["preemptions"] = sum(part.preemptions for part in parts)
        return replace(parts[0], **together)


_LISTS = (
    "prompt_token_ids",
    "response_token_ids",
    "rollout_log_probs",
    "finish_reasons",
    "top_token_ids",
    "routed_experts",
    "conversations",
)
"""The fields of a `RolloutBatch` with an entry per response."""


def check_requests(prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None) -> None:
    """Raise UserError before vLLM sees requests that would end its engine, or this call in the middle."""
    bad = [
        f"a prompt is {prompt!r:.60}"
        for prompt in prompts
        if not isinstance(prompt, list | tuple) or not prompt
    ]
    if seeds is not None and len(seeds) != len(prompts):
        bad.append(f"there are {len(prompts)} prompts and {len(seeds)} seeds")
    if bad:
        raise UserError(
            "the rollout engine cannot take these requests",
            where="generate",
            why=bad[0],
            fix="give lists of token ids (at least one a prompt), and as many seeds as prompts",
        )
