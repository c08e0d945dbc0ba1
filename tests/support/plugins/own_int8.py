"""A kernel for w8a8 on CPUs whose layout differs from the wire's: the codes are transposed, and FP32 already."""

from __future__ import annotations

from typing import Any

import torch

from qarl.kernels.base import LinearKernel, PreparedWeight, Tensors
from qarl.kernels.reference import quantize_int8
from qarl.kernels.registry import register
from qarl.schemes.base import INT8_INT8, Scheme
from qarl.schemes.kernel_choice import KernelChoice

NAME = "own_int8"


@register
class OwnInt8Linear(LinearKernel):
    """Products in float64, whose sums of integers are exact, rounded once."""

    name = NAME
    operands = INT8_INT8
    options = (KernelChoice.QARL,)
    quantize_input = staticmethod(quantize_int8)

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if device.type == "cpu" else f"runs on cpu, not on {device.type}"

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return 4 * rows * columns + 4 * rows

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedWeight:
        scale = tensors["weight_scale"].t().clone(memory_format=torch.contiguous_format)
        return PreparedWeight(tensors["weight"].t().float().contiguous(), scale)

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        values, token_scale = quantize_int8(x)
        sums = values.double() @ prepared.weight.double()
        y = sums.mul_(prepared.scale.double()).mul_(token_scale.double())
        return (y if bias is None else y + bias.double()).to(x.dtype)
