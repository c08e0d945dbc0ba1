"""verl's reward manager for `reward.keep_special_tokens`: the reward gets a response with its special tokens.

verl's own manager removes them, and no key of verl's changes that. It decodes with the tokenizer that it is given.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from qarl.data.response_text import response_texts


class KeepSpecialTokens(NaiveRewardManager):
    """verl's manager, but for what its tokenizer decodes."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **more: Any) -> None:
        super().__init__(config, _Kept(tokenizer), compute_score, **more)


def keeps_special_tokens(config: Any) -> bool:
    """Return whether verl's whole `config` names `KeepSpecialTokens`. An environment then gets turns with them, too."""
    return bool(config.reward.reward_manager.name == KeepSpecialTokens.__name__)


class _Kept:
    """A tokenizer that keeps special tokens when it decodes. Everything else is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Any, **_: Any) -> str:
        return response_texts(self._tokenizer, [token_ids], keep_special_tokens=True)[0]
