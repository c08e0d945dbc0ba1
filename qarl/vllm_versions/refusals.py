"""The exceptions by which vLLM refuses a request, after which it works on."""

from __future__ import annotations


def is_refusal(error: Exception) -> bool:
    """Whether vLLM raised `error` about a request, and works on: a ValueError, in newer releases a VLLMClientError."""
    return isinstance(error, ValueError) or "VLLMClientError" in {kind.__name__ for kind in type(error).__mro__}
