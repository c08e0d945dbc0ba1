"""The exceptions by which vLLM refuses a request, after which it works on."""

from __future__ import annotations


def is_refusal(error: Exception) -> bool:
    """Whether vLLM only refused a request and still works: a ValueError, or in newer releases a VLLMClientError."""
    return isinstance(error, ValueError) or "VLLMClientError" in {kind.__name__ for kind in type(error).__mro__}
