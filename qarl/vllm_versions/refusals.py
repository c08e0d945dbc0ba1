"""Exceptions with which vLLM rejects a request but keeps running."""

from __future__ import annotations


def is_refusal(error: Exception) -> bool:
    """Return whether vLLM keeps running after raising `error`: ValueError or, in newer releases, VLLMClientError."""
    return isinstance(error, ValueError) or "VLLMClientError" in {kind.__name__ for kind in type(error).__mro__}
