"""Which kernels vLLM chooses: QaRL's own if they are asked for, and which one for a weight, without an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from qarl.kernels.cuda.vllm_linears import chosen_int4_kernel
from qarl.process import configure_vllm_process
from qarl.rollout.kernel_request import KernelRequest, engine_arguments, kernel_request
from qarl.rollout.vllm_plugin import check_linears_loaded
from qarl.schemes import Scheme
from qarl.schemes.kernel_choice import KernelChoice
from qarl.vllm_versions import check_release


def own_kernels(request: KernelRequest | None) -> AbstractContextManager[None]:
    """Return a context in which vLLM uses the kernels that `request` names. If `request` is None, vLLM chooses as
    usual."""
    if request is None:
        return nullcontext()
    from qarl.rollout.vllm_plugin.own_linears import own_kernels_only

    return own_kernels_only()


def _require_vllm() -> None:
    configure_vllm_process()
    check_release()


def chosen_kernel(
    scheme: Scheme,
    shape: tuple[int, int],
    full_shape: tuple[int, int],
    kernels: KernelChoice = KernelChoice.ENGINE,
) -> str:
    """Return the name of the kernel class that vLLM uses on this machine for a weight.

    `full_shape`: [N, K] of the weight. `shape`: [N, K] of the part of the weight that one GPU has. `kernels`: a value
    of `quant.kernels`.

    Raises:
        ValueError: no kernel of vLLM supports the weight; the message gives the reason for each kernel.
        UserError: this version of vLLM is not supported, because its functions are missing or changed.
    """
    _require_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config

    request = kernel_request(kernels, scheme.name)
    check_linears_loaded(kernels)
    with own_kernels(request), set_current_vllm_config(VllmConfig(**engine_arguments(request))):
        if scheme.packs_codes:
            return chosen_int4_kernel(shape, full_shape, scheme.group_size or -1)
        return type(_chosen_8bit_kernel(scheme, shape)).__name__


def _chosen_8bit_kernel(scheme: Scheme, shape: tuple[int, int]) -> object:
    import torch
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.quantization.utils import quant_utils

    assert scheme.weights is not None
    if scheme.weights.type == "int":
        return kernels.init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name="doctor",
        )
    return kernels.init_fp8_linear_kernel(
        activation_quant_key=quant_utils.kFp8DynamicTokenSym,
        weight_quant_key=quant_utils.kFp8StaticChannelSym,
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        weight_shape=shape,
    )
