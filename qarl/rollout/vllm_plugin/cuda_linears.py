"""vLLM's FP8 linears with a number of rows from which on a row does not depend on the others.

A kernel's `least_rows` says how many that are, and why. An engine of level `model` is asked for it by its
`additional_config`; in other engines the class here serves no layer. CUDA graphs of decode steps begin at so many rows
(`qarl.rollout.engine_config.capture_sizes`), so padding here is for short prefills, and for engines with fewer
requests. vLLM's own quantization of activations pads its outputs, so it costs no more launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.platforms import current_platform

from qarl.errors import UserError
from qarl.rollout.kernel_request import LEAST_ROWS_KEY


def requested_rows() -> int | None:
    """Return the least rows that the engine that is being built was asked for, or None."""
    config = get_current_vllm_config_or_none()
    additional = config.additional_config if config is not None else None
    return additional.get(LEAST_ROWS_KEY) if isinstance(additional, Mapping) else None


class QaRLPaddedFP8LinearKernel(CutlassFP8ScaledMMLinearKernel):
    """vLLM's CUTLASS kernel on at least `requested_rows()` rows."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if requested_rows() is None:
            return False, "quant.align is below model, or quant.kernels is not engine"
        return super().can_implement(c)

    def get_output_padding(self) -> int | None:
        """Return the rows that the quantized activations have at least. vLLM asks once, when it builds the layer."""
        return requested_rows()

    def apply_scaled_mm(
        self, *, A: torch.Tensor, output_shape: list[int], **operands: Any
    ) -> torch.Tensor:
        """A [padded rows, K] -> BF16 of `output_shape`, whose rows are those before the padding."""
        shape = [A.shape[0], output_shape[-1]]
        padded = super().apply_scaled_mm(A=A, output_shape=shape, **operands)
        rows = math.prod(output_shape[:-1])
        return padded[:rows].view(*output_shape[:-1], padded.shape[-1])


def register() -> None:
    """Register the class with vLLM, before vLLM's own, which take any layer."""
    vllm_linear.register_linear_kernel(QaRLPaddedFP8LinearKernel, current_platform._enum, "fp8")
    kernels = vllm_linear._POSSIBLE_FP8_KERNELS[current_platform._enum]
    kernels.insert(0, kernels.pop())


def check_rows(model: nn.Module) -> None:
    """Raise UserError if an FP8 linear of the engine's `model`, which was asked for padding, does not pad."""
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "scheme", None), "fp8_linear", None)
        if kernel is not None and not isinstance(kernel, QaRLPaddedFP8LinearKernel):
            raise UserError(
                f"vLLM chose {type(kernel).__name__} for a layer",
                where=name,
                why="at quant.align=model the trainer follows vLLM's CUTLASS kernel",
                fix="unset VLLM_DISABLED_KERNELS and linear_backend, or set quant.align=linears",
            )
