"""How an engine is asked for QaRL's own kernels (`quant.kernels`), and for arithmetic that the trainer follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from qarl.schemes.kernel_choice import KernelChoice

REQUEST_KEY = "qarl_linears"
"""The entry of vLLM's `additional_config` that names QaRL's kernels. Every process of the engine gets it."""
FOLLOWED_KEY = "qarl_followed"
"""The entry that says that the trainer follows the engine's operators on a GPU (levels `model` and `exact`)."""
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


def engine_arguments(
    request: KernelRequest | None, *, followed: bool = False, least_rows: int = 1
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` for this request. `followed`: whether the engine is on a GPU and the trainer
    follows its operators. `least_rows`: those that its linears get at least."""
    asked: dict[str, Any] = {}
    if request is not None:
        asked[REQUEST_KEY] = [request.kernels.value, request.scheme]
    if followed:
        asked[FOLLOWED_KEY] = True
    if least_rows > 1:
        asked[LEAST_ROWS_KEY] = least_rows
    return {"additional_config": asked} if asked else {}


def request_of(vllm_config: Any) -> KernelRequest | None:
    """Return what the engine with this config of vLLM's was asked for, or None if it uses vLLM's own kernels."""
    asked = _asked(vllm_config)
    return KernelRequest.of(*asked[REQUEST_KEY]) if REQUEST_KEY in asked else None


def is_followed(vllm_config: Any) -> bool:
    """Return whether the trainer follows the operators of the engine with this config of vLLM's, on a GPU."""
    return bool(_asked(vllm_config).get(FOLLOWED_KEY))


def _asked(vllm_config: Any) -> Mapping[str, Any]:
    additional = getattr(vllm_config, "additional_config", None)
    return additional if isinstance(additional, Mapping) else {}
