"""How an engine is asked for QaRL's own linear kernels (`quant.kernels`)."""

from __future__ import annotations

from typing import Any, NamedTuple

REQUEST_KEY = "qarl_linears"
"""The entry of vLLM's `additional_config` that names QaRL's linear kernels. Every process of the engine gets it."""


class KernelRequest(NamedTuple):
    """`kernels`: a value of `quant.kernels` other than engine. `scheme`: the name of the quantization scheme."""

    kernels: str
    scheme: str


def kernel_request(kernels: str, scheme: str) -> KernelRequest | None:
    """Return the request of a run, or None if the engine uses vLLM's own kernels."""
    return None if kernels == "engine" else KernelRequest(kernels, scheme)


def engine_arguments(request: KernelRequest | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` for this request."""
    return {} if request is None else {"additional_config": {REQUEST_KEY: list(request)}}
