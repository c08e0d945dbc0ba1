"""Quantize activations to 8 bits with one scale per token, and compute silu(gate) * up, with vLLM's arithmetic.

vLLM's arithmetic differs between CPU and CUDA:

       on CPU (`quantize_int8`, `quantize_fp8`)         on CUDA (`..._cuda`)
int8   s = amax / 127, q = rint(x * (1 / s))            q = rint(x * (127 / amax))
fp8    s = max(amax / 448, 1 / (448 * 512)),            q = e4m3(clamp(x / s))
       q = e4m3(clamp(x * (1 / s), -448, 448))

The CPU functions follow vLLM's oneDNN operator `dynamic_scaled_int8_quant` and `QuantFP8.forward_native`. The CUDA
functions follow csrc/quantization/w8a8/int8/scaled_quant.cu and w8a8/fp8/common.cu, and are the reference for the
Triton kernels. A row of zeros gives zeros, and its int8 scale is 0. compressed-tensors computes scales differently, but
the engine does not run compressed-tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

INT8_MAX = 127.0
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> int8 [M, K], FP32 scales [M, 1]. For amax < 4e-37, 1 / s is clamped (in vLLM it is Inf)."""
    scale = _amax(x).div_(INT8_MAX)
    reciprocal = scale.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
    return (x.float() * reciprocal).round_().clamp_(-128, 127).to(torch.int8), scale


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> float8_e4m3fn [M, K] and FP32 scales [M, 1]."""
    scale = _amax(x).div_(FP8_MAX).clamp_(min=FP8_MIN_SCALE)
    return (x.float() * scale.reciprocal()).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values * scale, rounded to BF16 [M, K]. The backward uses this as the activations."""
    return values.float().mul_(scale).to(torch.bfloat16)


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).float()


def quantize_int8_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> int8 [M, K], FP32 scales [M, 1]. For amax < 4e-37, 127 / amax is clamped (in vLLM it is Inf)."""
    amax = _amax(x)
    top = torch.full_like(amax, INT8_MAX)  # a Python number would be multiplied by its reciprocal on CUDA
    reciprocal = torch.where(amax == 0, 0.0, top / amax).clamp_(max=torch.finfo(torch.float32).max)
    return (x.float() * reciprocal).round_().clamp_(-128, 127).to(torch.int8), amax / top


def quantize_fp8_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> float8_e4m3fn [M, K] and FP32 scales [M, 1]."""
    amax = _amax(x)
    scale = (amax / torch.full_like(amax, FP8_MAX)).clamp_(min=FP8_MIN_SCALE)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Round silu(gate) to BF16, then multiply by up, as vLLM's `silu_and_mul` does. All tensors are BF16 [M, K]."""
    return F.silu(gate) * up
