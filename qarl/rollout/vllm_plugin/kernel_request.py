"""How the process that starts an engine tells QaRL's plugin in vLLM which linear kernels to use.

The request travels in vLLM's `additional_config`, which every process of the engine gets. Reading it does not need
vLLM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

KEY = "qarl_linears"
"""The entry of vLLM's `additional_config`."""


class Asked(NamedTuple):
    """`kernels`: a value of `quant.kernels` other than engine. `scheme`: the name of the quantization scheme."""

    kernels: str
    scheme: str


def asked_for(kernels: str, scheme: str) -> Asked | None:
    """Return the request of a run, or None if the engine uses vLLM's own kernels."""
    return None if kernels == "engine" else Asked(kernels, scheme)


def engine_arguments(asked: Asked | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` for this request."""
    return {} if asked is None else {"additional_config": {KEY: list(asked)}}
