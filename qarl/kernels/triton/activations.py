"""Quantize activations to int8 or e4m3 with one scale per token.

Projections with the same input (q, k, v; gate, up) share one call. The arithmetic is that of vLLM's CUDA operators
(`qarl.kernels.activations` has it in PyTorch), with one exception. vLLM ignores a NaN in the maximum (fmaxf). Here a
NaN or Inf in a row makes its scale NaN or Inf, so the NaN is not lost.

One program quantizes each row, for every M, so results do not depend on the batch. Bytes per element: 2 read and 1
written. At 4.3e12 B/s on H200, [8192, 4096] takes 23 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.activations import FP8
from qarl.kernels.device import launch
from qarl.kernels.triton._compat import (
    LAUNCH,
    e4m3_bits,
    has_e4m3,
    require,
    require_device,
    to_fp32,
)
from qarl.kernels.triton.quantize import row_block

_INT_BITS = tl.constexpr(12582912.0)  # x + this has round-half-even(x) in its low bits


@triton.jit
def _magnitude(x):
    """Return the bits of |x| as int32. They sort like the numbers, with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(magnitude, FP8: tl.constexpr):
    """Return the scale and a factor f from the bits of the row's maximum. Codes are x * f (int8) or x / f (e4m3)."""
    amax = magnitude.to(tl.float32, bitcast=True)
    if FP8:
        scale = tl.div_rn(amax, 448.0)
        scale = tl.where(scale < 4.359654192014924e-06, 4.359654192014924e-06, scale)
        return scale, scale
    factor = tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, amax))
    return tl.div_rn(amax, 127.0), tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)


@triton.jit
def _codes(x, factor, FP8: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the codes of x, int8 or e4m3 as uint8."""
    if FP8:
        q = tl.div_rn(x, tl.broadcast_to(factor, x.shape))
        codes = e4m3_bits(tl.minimum(tl.maximum(q, -448.0), 448.0), HARDWARE)
    else:
        shifted = tl.minimum(tl.maximum(x * factor, -128.0), 127.0) + _INT_BITS
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_tokens_kernel(
    x_ptr, values_ptr, scale_ptr, cols, row_stride,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Quantize one row. A row of one block (`SINGLE`) stays in registers. A longer one is read a second time."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    column = tl.arange(0, BLOCK)
    out = row * cols + column
    x = to_fp32(tl.load(x_ptr + column, mask=column < cols, other=0.0))
    largest = _magnitude(x)
    if not SINGLE:
        for start in range(BLOCK, cols, BLOCK):
            x = to_fp32(tl.load(x_ptr + start + column, mask=start + column < cols, other=0.0))
            largest = tl.maximum(largest, _magnitude(x))
    scale, factor = _scale(tl.max(largest, axis=0), FP8)
    tl.store(scale_ptr + row, scale)
    if SINGLE:
        tl.store(values_ptr + out, _codes(x, factor, FP8, HARDWARE), mask=column < cols)
    else:
        for start in range(0, cols, BLOCK):
            x = to_fp32(tl.load(x_ptr + start + column, mask=start + column < cols, other=0.0))
            tl.store(values_ptr + out + start, _codes(x, factor, FP8, HARDWARE), mask=start + column < cols)


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [M, K], rows may be strided -> (`dtype` [M, K], FP32 scales [M, 1]).

    `dtype`: torch.int8 (as `quantize_int8_cuda`) or torch.float8_e4m3fn (as `quantize_fp8_cuda`). Raise ValueError for
    any other shape or dtype.
    """
    require(x.ndim == 2 and x.shape[1] > 0, f"x must be [M, K] with K of 1 or more, not {list(x.shape)}")
    require(x.dtype == torch.bfloat16, f"x must be bfloat16, not {x.dtype}")
    require(dtype in (torch.int8, FP8), f"activations can be quantized to int8 or float8_e4m3fn, not {dtype}")
    require_device(x)
    x = x.detach()
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    if x.shape[0]:
        block, warps = row_block(x.shape[1])
        launch(
            quantize_tokens_kernel, (x.shape[0],),
            x, values.view(torch.uint8) if dtype == FP8 else values, scale, x.shape[1], x.stride(0),
            FP8=dtype == FP8, HARDWARE=has_e4m3(x.device), BLOCK=block, SINGLE=x.shape[1] <= block,
            num_warps=warps, **LAUNCH,
        )  # fmt: skip
    return values, scale
