"""W8A8 linears with adapters on a CPU. vLLM alone cannot start such an engine.

vLLM's kernel packs the int8 weight into an oneDNN handler and sets the layer's weight to None. Its LoRA wrapper then
asks that weight for its device, and fails. The class here leaves an empty tensor. It multiplies as vLLM's kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import current_platform

from qarl.rollout.vllm_plugin.own_linears import Answer, disabled_kernels


class QaRLAdaptedInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's kernel, for engines with adapters."""

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        config = get_current_vllm_config_or_none()
        if config is None or config.lora_config is None:
            return False, "the engine has no adapters"
        return super().can_implement(c)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        name = self.layer_param_names[0]
        if getattr(layer, name) is None:
            setattr(
                layer, name, nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)
            )


@cache
def _register() -> None:
    vllm_linear.register_linear_kernel(QaRLAdaptedInt8LinearKernel, current_platform._enum, "int8")


@contextmanager
def adapted_int8() -> Iterator[None]:
    """Let engines that are built in this context multiply with `QaRLAdaptedInt8LinearKernel`."""
    _register()
    with disabled_kernels({CPUInt8ScaledMMLinearKernel.__name__}):
        yield
