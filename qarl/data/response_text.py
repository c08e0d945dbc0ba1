"""The text of a response that a reward function gets, the same in every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def response_texts(
    tokenizer: Any, responses: Sequence[Sequence[int]], *, keep_special_tokens: bool
) -> list[str]:
    """Return the text of each response (token ids).

    `keep_special_tokens`: with the tokenizer's special tokens, also the one that ends a response; otherwise without."""
    texts: list[str] = tokenizer.batch_decode(
        responses, skip_special_tokens=not keep_special_tokens
    )
    return texts
