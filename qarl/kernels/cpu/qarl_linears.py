"""QaRL's own linears on CPUs, which the trainer and the rollout engine both call (`quant.kernels`).

W4A8 (`qarl_cpu_w4a8`): int4 weights in groups along K, int8 activations with one scale per token. vLLM on CPUs would
run such a checkpoint with BF16 activations, so it has no kernel to follow. The arithmetic is:

    q, s = quantize_int8(x)                             as in vLLM's W8A8 (`qarl.kernels.activations`)
    sum  = sum over k in group g of q[m, k] code[n, k]  an integer, exact
    acc  = acc + float(sum) * scale[n, g]               FP32, one group after another, each step rounded
    y    = bf16(acc * s[m] + b[n])                      FP32, each step rounded

No step depends on the number of rows, on fused layers or on threads: sums are exact, and everything else is
elementwise. Fused multiply-adds are avoided, because PyTorch uses them only in some lanes of a vector.

Dequantized (`dequantized`): W4A16 by a BF16 product. The weight is dequantized once per publish. BF16 products of fewer
than 17 rows may add in a different order, so fewer rows are padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.activations import dequantize, quantize_int8
from qarl.kernels.base import LinearKernel
from qarl.kernels.cpu.torch_ops import int8_unavailable
from qarl.kernels.int4 import dequantize_int4, unpack_int4

_ROWS_AT_A_TIME = 64
"""Rows multiplied at a time, while their FP32 sums are cached."""
_MIN_ROWS = 17


class PreparedW4A8(NamedTuple):
    """`weight` int8 [K/g, g, N], the codes; `scale` FP32 [K/g, N]."""

    weight: torch.Tensor
    scale: torch.Tensor


class PreparedDequantized(NamedTuple):
    """`weight` BF16 [N, K]; `scale` is empty, because the weight contains the scales."""

    weight: torch.Tensor
    scale: torch.Tensor


class CpuW4A8Linear(LinearKernel):
    """W4A8 with `torch._int_mm`, one product per group."""

    name = "qarl_cpu_w4a8"
    prepared = PreparedW4A8

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        return int8_unavailable(device)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedW4A8:
        """Unpack the codes to one byte each, and transpose codes and scales."""
        scale = tensors["weight_scale"]
        codes = unpack_int4(tensors["weight_packed"]).view(*scale.shape, -1)  # [N, K/g, g]
        return PreparedW4A8(codes.permute(1, 2, 0).contiguous(), scale.t().float().contiguous())

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedW4A8, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] BF16, any strides -> [M, N] BF16."""
        codes, scale = prepared
        values, token_scale = quantize_int8(x)
        group, channels = codes.shape[1:]
        output = x.new_empty(x.shape[0], channels)
        fp32_bias = None if bias is None else bias.float()
        for start in range(0, x.shape[0], _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            total = torch.zeros(values[rows].shape[0], channels, dtype=torch.float32)
            for number, (one, its_scale) in enumerate(zip(codes, scale, strict=True)):
                sums = torch._int_mm(values[rows, number * group : (number + 1) * group], one)
                total.add_(sums.float().mul_(its_scale))
            total.mul_(token_scale[rows])
            output[rows] = total if fp32_bias is None else total.add_(fp32_bias)
        return output

    @staticmethod
    def dequantized_input(x: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize_int8(x))


class DequantizedW4A16Linear(LinearKernel):
    """W4A16 weights, multiplied in BF16. This is no low-bit product: it is for debugging and for small machines."""

    name = "dequantized"
    prepared = PreparedDequantized

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if device.type == "cpu" else f"runs on cpu, not on {device.type}"

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> PreparedDequantized:
        """Dequantize the weight to BF16, with the operand of vLLM's W4A16 kernel."""
        scale = tensors["weight_scale"]
        return PreparedDequantized(dequantize_int4(tensors["weight_packed"], scale), scale.new_empty(0))

    @staticmethod
    def dequantized_weight(prepared: PreparedDequantized) -> torch.Tensor:
        return prepared.weight

    @staticmethod
    def linear(x: torch.Tensor, prepared: PreparedDequantized, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        return F.linear(F.pad(x, (0, 0, 0, max(_MIN_ROWS - rows, 0))), prepared.weight, bias)[:rows]
