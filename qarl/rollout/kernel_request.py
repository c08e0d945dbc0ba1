"""How an engine is asked for QaRL's own linear kernels (`quant.kernels`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from qarl.schemes.kernel_choice import KernelChoice

REQUEST_KEY = "qarl_linears"
"""The entry of vLLM's `additional_config` that names QaRL's linear kernels. Every process of the engine gets it."""

LEAST_ROWS_KEY = "qarl_least_rows"
"""The entry with the rows that the engine's linears get at least (`LinearKernel.least_rows`)."""


class KernelRequest(NamedTuple):
    """`kernels`: other than the engine's own. `scheme`: the name of the quantization scheme."""

    kernels: KernelChoice
    scheme: str

    @classmethod
    def of(cls, kernels: str, scheme: str) -> KernelRequest:
        """Return the request whose parts have become texts on the way to the engine."""
        return cls(KernelChoice(kernels), scheme)


def kernel_request(kernels: KernelChoice, scheme: str) -> KernelRequest | None:
    """Return the request of a run, or None if the engine uses vLLM's own kernels."""
    return None if kernels.by_engine else KernelRequest(kernels, scheme)


def engine_arguments(request: KernelRequest | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` for this request."""
    return (
        {}
        if request is None
        else {"additional_config": {REQUEST_KEY: [request.kernels.value, request.scheme]}}
    )
