"""Exact PyTorch low-bit linears: slow, readable, on every device; the truth the other kernels are tested against.

W4A16 multiplies BF16 activations by the BF16 dequantized weight, `bf16(float(q - 8) * float(scale))`, which is the
operand vLLM's CPU kernel builds in registers (csrc/cpu/cpu_wna16.cpp). Only the order of the FP32 accumulation is
the library's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from qarl.kernels.int4 import dequantize_int4


class ReferenceLinear:
    """Dequantize once, then `torch.nn.functional.linear` in the activations' dtype."""

    name = "reference"

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if scheme_name == "w4a16" else f"serves w4a16, not {scheme_name}"

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The BF16 weight [N, K] that the low-bit tensors stand for."""
        return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"])

    @staticmethod
    def linear(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] BF16 -> [M, N] BF16."""
        return F.linear(x, prepared, bias)
