"""Texts and token ids that end a response in verl: `rollout.stop` and `rollout.stop_token_ids`.

verl has no keys for them. Its section `actor_rollout_ref.rollout.custom` is open for others, and QaRL's agent loops
pass what stands there on to vLLM, in training and validation. verl's server does not say what has ended a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAMES = ("stop", "stop_token_ids")


@dataclass(frozen=True)
class Stops:
    """`texts` and `token_ids` that end a response, beside those of the model."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, rollout: Any) -> Stops:
        """Return those of verl's section `rollout`."""
        custom = rollout.get("custom") or {}
        return cls(*(tuple(custom.get(name) or ()) for name in NAMES))

    def added_to(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's sampling parameters with these."""
        own = {"stop": [*self.texts], "stop_token_ids": [*self.token_ids]}
        return {**sampling, **{name: values for name, values in own.items() if values}}

    def in_text(self, tokens: Sequence[int], tokenizer: Any) -> bool:
        """Return whether a text has ended these tokens: it is in what they say, and not in all but the last of them."""
        if not self.texts:
            return False
        before, text = (
            tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:-1], tokens)
        )
        return any(stop in text and stop not in before for stop in self.texts)
