"""QaRL's own linear kernels in vLLM, for `quant.kernels` = qarl or dequantized.

`register_linear_kernel` adds three classes to the kernels that vLLM chooses from. Both supported releases have the same
function, base classes and layer configs. A class supports a layer only if the engine was started with
`engine_arguments`, so other engines in the same process are not affected. vLLM tries its own kernels first, so
`own_kernels_only` disables them while the engine starts (environment variable VLLM_DISABLED_KERNELS).

The classes call the trainer's kernel (`qarl.kernels.registry.own_kernel`) on the tensors that its `prepare` makes. The
call is a custom operator, which torch.compile and CUDA graphs treat as one operation.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from qarl.errors import UserError
from qarl.kernels.base import LinearKernel, PreparedWeight
from qarl.kernels.registry import own_kernel
from qarl.rollout.kernel_request import KernelRequest, request_of
from qarl.rollout.publish.experts import holds_experts
from qarl.rollout.publish.stored_layer import kernel_of
from qarl.schemes import get_scheme

_DISABLED = "VLLM_DISABLED_KERNELS"
_TABLES = ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS", "_POSSIBLE_FP8_KERNELS")
Answer = tuple[bool, str | None]


def requested() -> KernelRequest | None:
    """Return what the engine that is being built was asked for, or None if it uses vLLM's own kernels."""
    return request_of(get_current_vllm_config_or_none())


def _asked_kernel(request: KernelRequest) -> type[LinearKernel]:
    """Return the kernel that trainer and engine both run. The check of the config knows that there is one."""
    kernel = own_kernel(request.kernels, get_scheme(request.scheme).operands)
    assert kernel is not None
    return kernel


@torch.library.custom_op(
    "qarl::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str kernels, str scheme, int channels) -> Tensor",
)
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    kernels: str,
    scheme: str,
    channels: int,
) -> torch.Tensor:
    """x BF16 [M, K] -> BF16 [M, channels], by the kernel of a request (`kernels`, `scheme`)."""
    kernel = _asked_kernel(KernelRequest.of(kernels, scheme))
    y: torch.Tensor = kernel.linear(x, PreparedWeight(weight, scale), bias)
    return y


@_linear.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: Any,
    kernels: str,
    scheme: str,
    channels: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], channels)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
    )


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class OwnLinearKernel:
    """The part that all three classes share. `request`: what the engine was asked for when the layer was built.

    `qarl.rollout.publish.cpu_layers` finds it by its name."""

    request: KernelRequest

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments are those of the vLLM class that stands behind this one among the bases."""
        super().__init__(*arguments, **named)
        request = requested()
        assert request is not None
        self.request = request

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return True, None

    @staticmethod
    def why_not(format: str, shape: tuple[int, int], group_size: int = 128) -> str | None:
        """Return why QaRL's kernel does not multiply a weight [N, K] in this engine, or None if it does. `format`:
        compressed-tensors' name for the layout of the weights that the class takes. `group_size` is for schemes that
        have groups."""
        request = requested()
        if request is None:
            return "quant.kernels=engine"
        if get_scheme(request.scheme).format != format:
            return f"the scheme is {request.scheme}"
        device = torch.device(current_platform.device_type)
        scheme = get_scheme(request.scheme, group_size)
        return _asked_kernel(request).refusal(scheme, device, shape)

    @property
    def own(self) -> Any:
        return _asked_kernel(self.request)

    @property
    def names(self) -> tuple[str, str]:
        """The parameters of a layer with its weight and its scales, which are those of the wire tensors, too."""
        raise NotImplementedError

    def loaded(self, layer: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters of `layer`: wire tensors after loading, later what `prepare` returned."""
        return {name: layer.get_parameter(name).data for name in self.names}

    def write(self, layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weight of `layer` by the wire tensors `tensors`, as the kernel's `prepare` converts them."""
        for name, prepared in zip(self.names, self.own.prepare(tensors), strict=True):
            parameter = layer.get_parameter(name)
            if _is_same(parameter, prepared):
                continue  # the kernel reads it as on the wire
            if parameter.dtype == prepared.dtype and parameter.shape == prepared.shape:
                if _shares_memory(parameter, prepared):  # a transposed view, say
                    prepared = prepared.clone()
                parameter.data.copy_(prepared)  # a CUDA graph may have captured the address
            else:
                parameter.data = prepared

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        channels: int,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        request = (self.request.kernels.value, self.request.scheme)
        y = torch.ops.qarl.linear(rows, weight, scale, bias, *request, channels)
        return y.view(*x.shape[:-1], channels)


class QaRLInt4LinearKernel(OwnLinearKernel, MPLinearKernel):
    """W4A16, W4A8 and dequantized W4A16. The parameters keep their names, and contain what `prepare` returned."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        if (
            (c.weight_type, c.act_type) != (scalar_types.uint4b8, torch.bfloat16)
            or c.zero_points
            or c.has_g_idx
        ):
            return False, "only symmetric int4 weights with BF16 inputs are supported"
        why_not = cls.why_not("pack-quantized", c.partition_weight_shape[::-1], c.group_size)
        return why_not is None, why_not

    @property
    def names(self) -> tuple[str, str]:
        return self.w_q_name, self.w_s_name

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.write(layer, self.loaded(layer))

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = layer.get_parameter(self.w_q_name)
        scale = layer.get_parameter(self.w_s_name)
        return self.multiply(x, weight, scale, bias, self.config.partition_weight_shape[1])


class QaRLInt8LinearKernel(OwnLinearKernel, Int8ScaledMMLinearKernel):
    """W8A8, and other schemes with int8 weights. The parameters keep their names, as those of int4."""

    channels: int

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        if not c.is_channelwise or c.is_static_input_scheme or not c.input_symmetric:
            return False, "only channelwise weights and symmetric dynamic inputs are supported"
        why_not = cls.why_not("int-quantized", (32, 32))
        return why_not is None, why_not

    @property
    def names(self) -> tuple[str, str]:
        weight, scale = self.layer_param_names[:2]
        return weight, scale

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        tensors = self.loaded(layer)
        self.channels = len(tensors[self.names[0]])
        self.write(layer, tensors)

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale = self._get_layer_params(layer)[:2]
        return self.multiply(x, weight, scale, bias, self.channels)


class QaRLFP8LinearKernel(OwnLinearKernel, FP8ScaledMMLinearKernel):
    """FP8. vLLM's scheme transposes the weight before it calls the kernel, and this class transposes it back. So the
    parameters stay in the wire format."""

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        scales = c.weight_quant_key.scale, c.activation_quant_key.scale
        per_row = all(
            scale.group_shape.is_per_token() or scale.group_shape.is_per_channel()
            for scale in scales
        )
        if not per_row or scales[1].static:
            return False, "only channelwise weights and dynamic inputs per token are supported"
        why_not = cls.why_not("float-quantized", c.weight_shape)
        return why_not is None, why_not

    @property
    def names(self) -> tuple[str, str]:
        weight, scale = self.layer_param_names[:2]
        return weight, scale

    def write(self, layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        weight, scale = self.names
        layer.get_parameter(weight).data.t().copy_(tensors[weight])
        layer.get_parameter(scale).data.copy_(tensors[scale])

    def apply_weights(
        self, layer: nn.Module, x: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale = self._get_layer_params(layer)[:2]
        return self.multiply(x, weight.t(), scale, bias, weight.shape[1])

    def apply_scaled_mm(self, **operands: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does the whole product")


CLASSES: tuple[tuple[type, str], ...] = (
    (QaRLInt4LinearKernel, "mp"),
    (QaRLInt8LinearKernel, "int8"),
    (QaRLFP8LinearKernel, "fp8"),
)
"""Each class and its kind, the argument `kernel_type` of `register_linear_kernel`."""


def register() -> None:
    for kernel_class, kind in CLASSES:
        vllm_linear.register_linear_kernel(kernel_class, current_platform._enum, kind)


def own_kernels_only() -> AbstractContextManager[None]:
    """Disable vLLM's own linear kernels for engines that are built in this context."""
    ours = {kernel_class.__name__ for kernel_class, _ in CLASSES}
    lists = (getattr(vllm_linear, table).get(current_platform._enum, []) for table in _TABLES)
    return disabled_kernels({kernel.__name__ for kernels in lists for kernel in kernels} - ours)


@contextmanager
def disabled_kernels(names: Collection[str]) -> Iterator[None]:
    """Disable the classes of linear kernels with these names for engines that are built in this context."""
    before = os.environ.get(_DISABLED)
    os.environ[_DISABLED] = ",".join([*([before] if before else []), *sorted(names)])
    _read_environment_again()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLED]
        else:
            os.environ[_DISABLED] = before
        _read_environment_again()


def _read_environment_again() -> None:
    """Make vLLM see changed environment variables. It caches them as long as an engine runs in this process."""
    if hasattr(envs.__getattr__, "cache_info"):
        envs.disable_envs_cache()
        envs.enable_envs_cache()


def check_in_use(model: nn.Module, request: KernelRequest | None) -> None:
    """Raise UserError if a quantized layer of the engine's `model` has a kernel other than `request` says."""
    for name, module in model.named_modules():
        chosen = _chosen(module)
        if chosen is not None and request != getattr(chosen, "request", None):
            raise UserError(
                f"vLLM chose {type(chosen).__name__} for a layer",
                where=name,
                why="the trainer multiplies with QaRL's own kernel"
                if request
                else "quant.kernels=engine",
                fix=f"unset {_DISABLED}, or set quant.kernels=engine",
            )


def _chosen(module: nn.Module) -> Any:
    """Return what multiplies the weight of a quantized linear or of quantized experts, or None for other modules."""
    if holds_experts(module):
        method = module.quant_method
        names = {
            kind.__name__ for kind in type(method).__mro__
        }  # on CPUs it is a subclass of vLLM's
        return None if "UnquantizedFusedMoEMethod" in names else method
    return kernel_of(module)
