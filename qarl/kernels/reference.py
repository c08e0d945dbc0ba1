"""Exact low-bit linears in PyTorch: slow, readable, and for every device. Tests compare other kernels with them.

W4A16 multiplies BF16 activations by the BF16 dequantized weight, `bf16(float(q - 8) * float(scale))`. vLLM's CPU kernel
uses the same operand (csrc/cpu/cpu_wna16.cpp).

Schemes with 8-bit activations multiply the dequantized operands in float64 and round once: y = sum_k (q_x s_x) (q_w
s_w) + b. Each operand is exact in float64. W4A8 does the same with int4 weights and a scale per group.

Activations are quantized to 8 bits with one scale per token, with vLLM's arithmetic, which
differs between CPU and CUDA:

       on CPU (`quantize_int8`, `quantize_fp8`)         on CUDA (`..._cuda`)
int8   s = amax / 127, q = rint(x * (1 / s))            q = rint(x * (127 / amax))
fp8    s = max(amax / 448, 1 / (448 * 512)),            q = e4m3(clamp(x / s))
       q = e4m3(clamp(x * (1 / s), -448, 448))

The CPU functions follow vLLM's oneDNN operator `dynamic_scaled_int8_quant` and `QuantFP8.forward_native`. The CUDA
functions follow csrc/quantization/w8a8/int8/scaled_quant.cu and w8a8/fp8/common.cu, and are the reference for the
Triton kernels. A row of zeros gives zeros, and its int8 scale is 0. compressed-tensors computes scales differently, but
the engine does not run compressed-tensors.

`rms_norm` rounds as vLLM's CUDA operator of that name: FP32 throughout, and once to BF16
(csrc/libtorch_stable/layernorm_kernels.cu). `qarl.kernels.triton.norms` is its kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from qarl.kernels.base import LinearKernel, bf16_bytes
from qarl.kernels.int4 import dequantize_int4
from qarl.schemes.base import FP8_FP8, INT4_BF16, INT4_INT8, INT8_INT8, Scheme

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


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).float()


def quantize_int8_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> int8 [M, K], FP32 scales [M, 1]. For amax < 4e-37, 127 / amax is clamped (in vLLM it is Inf)."""
    amax = _amax(x)
    top = torch.full_like(
        amax, INT8_MAX
    )  # a Python number would be multiplied by its reciprocal on CUDA
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + epsilon) * weight, rounded once. BF16 [..., K] and [K] -> BF16 [..., K]."""
    return (x.float() * _norm_scale(x, epsilon) * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the rounded sum x + residual, and the sum. All tensors are BF16 [..., K] or [K]."""
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    weight_too: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dX BF16 [..., K], and dW FP32 [K] or None, as `qarl.kernels.triton.norms.rms_norm_backward`."""
    scale = _norm_scale(x, epsilon)
    normal = x.float() * scale
    of_normal = grad.float() * weight.float()
    grad_x = scale * (of_normal - normal * (of_normal * normal).mean(-1, keepdim=True))
    grad_weight = (grad.float() * normal).flatten(0, -2).sum(0) if weight_too else None
    return grad_x.to(x.dtype), grad_weight


def _norm_scale(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)


class _Reference(LinearKernel):
    name = "reference"
    reference = True

    @staticmethod
    def unavailable(device: torch.device, shape: tuple[int, int]) -> str | None:
        return None


class ReferenceW4A16Linear(_Reference):
    """Dequantize once, then call `torch.nn.functional.linear` in the activations' dtype."""

    operands = INT4_BF16
    multiplies_experts = True

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return bf16_bytes(shape)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the BF16 weight [N, K] that the low-bit tensors represent."""
        return dequantize_int4(tensors["weight_packed"], tensors["weight_scale"])

    @staticmethod
    def linear(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, prepared, bias)


class ReferenceW8A8Linear(_Reference):
    """Dequantize both operands to float64 at every call."""

    operands = INT8_INT8
    multiplies_experts = True
    quantize_input = staticmethod(quantize_int8)

    @staticmethod
    def prepare(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors

    @staticmethod
    def weight(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the exact dequantized weight, float64 [N, K]."""
        return tensors["weight"].double() * tensors["weight_scale"].double()

    @classmethod
    def linear(
        cls, x: torch.Tensor, prepared: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        values, scale = cls.quantize_input(x)
        exact = (values.double() * scale.double()) @ cls.weight(prepared).t()
        return (exact if bias is None else exact + bias.double()).to(x.dtype)


class ReferenceFP8Linear(ReferenceW8A8Linear):
    """Like ReferenceW8A8Linear, with float8_e4m3fn weights and activations."""

    operands = FP8_FP8
    quantize_input = staticmethod(quantize_fp8)


class ReferenceW4A8Linear(ReferenceW8A8Linear):
    """Like ReferenceW8A8Linear, with int4 weights in groups."""

    operands = INT4_INT8
    multiplies_experts = False

    @staticmethod
    def weight(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize_int4(
            tensors["weight_packed"], tensors["weight_scale"].double(), torch.float64
        )


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [M, K] sorted by expert, weight [E, N, K], ends [E] -> [M, N]. Rows ends[e-1]..ends[e]-1 use weight[e]."""
    starts = [0, *ends.tolist()]
    parts = [F.linear(x[starts[e] : starts[e + 1]], weight[e]) for e in range(weight.shape[0])]
    return torch.cat(parts)
