"""Exact low-bit linears in PyTorch: slow, readable, and for every device. Tests compare other kernels with them.

W4A16 multiplies BF16 activations by the BF16 dequantized weight, `bf16(float(q - 8) * float(scale))`. vLLM's CPU kernel
uses the same operand (csrc/cpu/cpu_wna16.cpp).

Schemes with 8-bit activations multiply the dequantized operands in float64 and round once: y = sum_k (q_x s_x) (q_w
s_w) + b. Each operand is exact in float64. W4A8 does the same with int4 weights and a scale per group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from qarl.kernels.activations import dequantize, quantize_fp8, quantize_int8
from qarl.kernels.base import LinearKernel
from qarl.kernels.int4 import dequantize_int4


class _Reference(LinearKernel):
    name = "reference"

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None


class ReferenceW4A16Linear(_Reference):
    """Dequantize once, then call `torch.nn.functional.linear` in the activations' dtype."""

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the BF16 weight [N, K] that the low-bit tensors represent."""
        return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"])

    @staticmethod
    def linear(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, prepared, bias)


class ReferenceW8A8Linear(_Reference):
    """Dequantize both operands to float64 at every call."""

    quantize_input = staticmethod(quantize_int8)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors

    @staticmethod
    def weight(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the exact dequantized weight, float64 [N, K]."""
        return tensors["weight"].double() * tensors["weight_scale"].double()

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = cls.quantize_input(x)
        exact = (values.double() * scale.double()) @ cls.weight(prepared).t()
        return (exact if bias is None else exact + bias.double()).to(x.dtype)

    @classmethod
    def dequantized_input(cls, x: torch.Tensor) -> torch.Tensor:
        return dequantize(*cls.quantize_input(x))


class ReferenceFP8Linear(ReferenceW8A8Linear):
    """Like ReferenceW8A8Linear, with float8_e4m3fn weights and activations."""

    quantize_input = staticmethod(quantize_fp8)


class ReferenceW4A8Linear(ReferenceW8A8Linear):
    """Like ReferenceW8A8Linear, with int4 weights in groups."""

    @staticmethod
    def weight(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"].double(), torch.float64)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [M, K] sorted by expert, weight [E, N, K], ends [E] -> [M, N]. Rows ends[e-1]..ends[e]-1 use weight[e]."""
    starts = [0, *ends.tolist()]
    parts = [F.linear(x[starts[e] : starts[e + 1]], weight[e]) for e in range(weight.shape[0])]
    return torch.cat(parts)
