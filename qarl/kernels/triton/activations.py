"""Activations to int8 or e4m3 with one scale a token, alone, after RMSNorm, and after SiLU(gate) * up, in one kernel.

The projections that read the same input (q, k, v; gate, up) share one call. The arithmetic is that of vLLM's separate
CUDA operators, one after the other, rounding to BF16 between them: qarl.kernels.activations says it in PyTorch. vLLM's
own fused operator, `rms_norm_dynamic_per_token_quant`, which its compiler may put in their place, differs: it
multiplies int8 by 1 / s instead of 127 / amax and keeps s above 1e-7. Where vLLM drops a NaN (fmaxf does), a row that
holds a NaN or an Inf gets a scale that is one too, and so does what is multiplied by it.

One program a row, whatever M: results do not depend on the batch. A row stays in registers between the maximum and
the quantization. Bytes an element: 2 read and 1 written; with a residual 2 more each way; SiLU reads 4. Over 4.3e12
B/s on H200: [8192, 4096] takes 23 us alone, 55 us with norm and residual; SiLU of [8192, 12288] takes 117 us.
Divisions and exponentials are IEEE and CUDA's `expf`, as in vLLM: about 25 instructions an element where SiLU's five
bytes buy 33.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qarl.kernels.activations import FP8, NATIVE, NormRounding
from qarl.kernels.triton._aot import AotConfig, AotKernel
from qarl.kernels.triton._compat import (
    LAUNCH,
    e4m3_bits,
    exp,
    has_e4m3,
    require,
    require_device,
    round_bf16,
    to_bf16,
    to_fp32,
)
from qarl.kernels.triton.quantize import row_block

_INT_BITS = tl.constexpr(12582912.0)  # x + this has round-half-even(x) in its low bits
_MAX_COLS = 16384


class QuantizedNorm(NamedTuple):
    """`values` int8 or e4m3 [M, K] and `scale` FP32 [M, 1]; `residual` BF16 [M, K], the sum, or None where there was
    nothing to add; `rstd` FP32 [M, 1], for the backward."""

    values: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor | None
    rstd: torch.Tensor


@triton.jit
def _magnitude(x):
    """The bits of |x| as int32, which order as the numbers do, NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(magnitude, FP8: tl.constexpr):
    """(s, f) from the largest magnitude's bits: int8 codes are x * f, e4m3 codes x / f."""
    amax = magnitude.to(tl.float32, bitcast=True)
    if FP8:
        scale = tl.div_rn(amax, 448.0)
        scale = tl.where(scale < 4.359654192014924e-06, 4.359654192014924e-06, scale)
        return scale, scale
    factor = tl.where(amax == 0.0, 0.0, tl.div_rn(127.0, amax))
    return tl.div_rn(amax, 127.0), tl.where(factor > 3.4028234663852886e38, 3.4028234663852886e38, factor)


@triton.jit
def _codes(x, factor, FP8: tl.constexpr, HARDWARE: tl.constexpr):
    """int8, or e4m3 as uint8."""
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
    """A row of one block stays in registers (`SINGLE`); a longer one is read twice, the second time from cache."""
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


@triton.jit
def norm_quantize_kernel(
    x_ptr, weight_ptr, residual_ptr, sum_ptr, values_ptr, scale_ptr, rstd_ptr, cols, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, ROUND_SUM: tl.constexpr, ROUND_NORMALISED: tl.constexpr, FP8: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole row in one block: three reductions' worth of reuse, nothing but the inputs is read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    x = to_fp32(tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0))
    if RESIDUAL:
        x += to_fp32(tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0))
        tl.store(sum_ptr + row * cols + column, to_bf16(x), mask=mask)
    if ROUND_SUM:
        x = round_bf16(x)
    mean = tl.div_rn(tl.sum(x * x, axis=0), cols * 1.0)
    rstd = tl.rsqrt(mean + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd
    if ROUND_NORMALISED:
        y = round_bf16(y)
    y = round_bf16(y * to_fp32(tl.load(weight_ptr + column, mask=mask, other=0.0)))
    scale, factor = _scale(tl.max(_magnitude(y), axis=0), FP8)
    tl.store(scale_ptr + row, scale)
    tl.store(values_ptr + row * cols + column, _codes(y, factor, FP8, HARDWARE), mask=mask)


@triton.jit
def _silu_mul(gate_ptr, up_ptr, column, mask):
    gate = to_fp32(tl.load(gate_ptr + column, mask=mask, other=0.0))
    up = to_fp32(tl.load(up_ptr + column, mask=mask, other=0.0))
    return round_bf16(round_bf16(tl.div_rn(gate, 1.0 + exp(0.0 - gate))) * up)


@triton.jit
def silu_mul_quantize_kernel(
    gate_ptr, up_ptr, values_ptr, scale_ptr, cols, gate_stride, up_stride,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Rows up to 16384 in one block, since a second pass computes the exponentials again. At 32768 a thread would need
    more registers than there are, and 18944 columns would leave half of them idle: those take the second pass."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    column = tl.arange(0, BLOCK)
    out = row * cols + column
    y = _silu_mul(gate_ptr, up_ptr, column, column < cols)
    largest = _magnitude(y)
    if not SINGLE:
        for start in range(BLOCK, cols, BLOCK):
            y = _silu_mul(gate_ptr, up_ptr, start + column, start + column < cols)
            largest = tl.maximum(largest, _magnitude(y))
    scale, factor = _scale(tl.max(largest, axis=0), FP8)
    tl.store(scale_ptr + row, scale)
    if SINGLE:
        tl.store(values_ptr + out, _codes(y, factor, FP8, HARDWARE), mask=column < cols)
    else:
        for start in range(0, cols, BLOCK):
            y = _silu_mul(gate_ptr, up_ptr, start + column, start + column < cols)
            tl.store(values_ptr + out + start, _codes(y, factor, FP8, HARDWARE), mask=start + column < cols)


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x BF16 [M, K], rows may be strided -> (`dtype` [M, K], FP32 scales [M, 1]).

    `dtype`: torch.int8 (equal to `quantize_int8_cuda`) or torch.float8_e4m3fn (`quantize_fp8_cuda`). Raises
    ValueError for what it cannot read.
    """
    x = _rows(x, "x", (torch.bfloat16,))
    values, scale = _outputs(x, dtype)
    if x.shape[0]:
        block, warps = row_block(x.shape[1])
        quantize_tokens_kernel[(x.shape[0],)](
            x, _bytes(values), scale, x.shape[1], x.stride(0), FP8=dtype == FP8, HARDWARE=has_e4m3(x.device),
            BLOCK=block, SINGLE=x.shape[1] <= block, num_warps=warps, **LAUNCH,
        )  # fmt: skip
    return values, scale


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    rounding: NormRounding = NATIVE,
) -> QuantizedNorm:
    """`quantize_tokens(rms_norm(x, weight, eps, residual, rounding))`; see qarl.kernels.activations for both.

    x BF16 or FP32 [M, K] and residual BF16 [M, K], rows may be strided; weight BF16 [K]; K up to 16384. Only the order
    in which the squares are added is different.
    """
    x = _rows(x, "x", (torch.bfloat16, torch.float32))
    rows, cols = x.shape
    require(cols <= _MAX_COLS, f"a row of {cols} does not fit one program; up to {_MAX_COLS} does")
    require(weight.shape == (cols,) and weight.dtype == torch.bfloat16, f"weight is BF16 [{cols}]")
    if residual is not None:
        residual = _rows(residual, "residual", (torch.bfloat16,))
        require(residual.shape == x.shape, f"residual {list(residual.shape)} is added to x {list(x.shape)}")
    values, scale = _outputs(x, dtype)
    rstd = torch.empty_like(scale)
    total = None if residual is None else x.new_empty(rows, cols, dtype=torch.bfloat16)
    if rows:
        require_device(x, weight, *(() if residual is None else (residual,)))
        block = triton.next_power_of_2(cols)
        norm_quantize_kernel[(rows,)](
            x, weight.contiguous(), x if residual is None else residual, x if total is None else total,
            _bytes(values), scale, rstd, cols, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            RESIDUAL=residual is not None, ROUND_SUM=rounding.sum, ROUND_NORMALISED=rounding.normalised,
            FP8=dtype == FP8, HARDWARE=has_e4m3(x.device), BLOCK=block, num_warps=_warps(block), **LAUNCH,
        )  # fmt: skip
    return QuantizedNorm(values, scale, total, rstd)


def silu_mul_quantize(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_tokens(silu_mul(gate, up))`: BF16 [M, K] twice, which may be the halves of one tensor."""
    gate, up = _rows(gate, "gate", (torch.bfloat16,)), _rows(up, "up", (torch.bfloat16,))
    require(gate.shape == up.shape, f"gate {list(gate.shape)} and up {list(up.shape)} are multiplied")
    rows, cols = gate.shape
    values, scale = _outputs(gate, dtype)
    if rows:
        require_device(gate, up)
        block, warps = _silu_block(cols)
        silu_mul_quantize_kernel[(rows,)](
            gate, up, _bytes(values), scale, cols, gate.stride(0), up.stride(0), FP8=dtype == FP8,
            HARDWARE=has_e4m3(gate.device), BLOCK=block, SINGLE=cols <= block, num_warps=warps, **LAUNCH,
        )  # fmt: skip
    return values, scale


def _silu_block(cols: int) -> tuple[int, int]:
    """(block, warps)."""
    block = triton.next_power_of_2(cols)
    return (block, _warps(block)) if cols <= _MAX_COLS else (4096, 8)


def _warps(block: int) -> int:
    """32 elements a thread: with 64, SiLU needs more registers than there are."""
    return max(block // 1024, 1)


def _rows(x: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    require(x.ndim == 2 and x.shape[1] > 0, f"{name} is [M, K] with K of 1 or more, not {list(x.shape)}")
    require(x.dtype in dtypes, f"{name} is {' or '.join(map(str, dtypes))}, not {x.dtype}")
    require_device(x)
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def _outputs(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    require(dtype in (torch.int8, FP8), f"activations are quantized to int8 or float8_e4m3fn, not {dtype}")
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.int8 else values.view(torch.uint8)


Blocks = tuple[tuple[int, int, dict[str, bool]], ...]
"""(block, warps, other constexprs) of one kernel."""


def _aot() -> list[AotKernel]:
    entries = []
    for fp8 in (False, True):
        out = {"values_ptr": "*u8" if fp8 else "*i8", "scale_ptr": "*fp32"}
        builds = ((False, (80,)), (True, (90, 100)))

        def configs(blocks: Blocks, fp8: bool = fp8, builds: tuple = builds) -> tuple[AotConfig, ...]:
            return tuple(
                AotConfig({"FP8": fp8, "HARDWARE": hardware, "BLOCK": block, **more}, warps, targets=targets)
                for block, warps, more in blocks
                for hardware, targets in builds
            )

        rows: Blocks = (
            (1024, 1, {"SINGLE": True}), (8192, 8, {"SINGLE": True}), (4096, 4, {"SINGLE": False}),
        )  # fmt: skip
        types = {"x_ptr": "*bf16", **out, "cols": "i32", "row_stride": "i32"}
        entries.append(AotKernel(quantize_tokens_kernel, types, configs(rows), ("cols", "row_stride")))
        for x, residuals in (("*bf16", (False, True)), ("*fp32", (False,))):
            types = {"x_ptr": x, "weight_ptr": "*bf16", "residual_ptr": "*bf16", "sum_ptr": "*bf16", **out,
                     "rstd_ptr": "*fp32", "cols": "i32", "x_stride": "i32", "residual_stride": "i32",
                     "eps": "fp32"}  # fmt: skip
            whole: Blocks = tuple(
                (block, _warps(block),
                 {"RESIDUAL": residual, "ROUND_SUM": rounded, "ROUND_NORMALISED": not rounded})
                for block in (2048, 16384) for residual in residuals for rounded in (False, True)
            )  # fmt: skip
            divisible = ("cols", "x_stride", "residual_stride")
            entries.append(AotKernel(norm_quantize_kernel, types, configs(whole), divisible))
        types = {"gate_ptr": "*bf16", "up_ptr": "*bf16", **out, "cols": "i32", "gate_stride": "i32",
                 "up_stride": "i32"}  # fmt: skip
        rows = tuple((*_silu_block(cols), {"SINGLE": cols <= _MAX_COLS}) for cols in (1024, 16384, 18944))
        divisible = ("cols", "gate_stride", "up_stride")
        entries.append(AotKernel(silu_mul_quantize_kernel, types, configs(rows), divisible))
    return entries


AOT = _aot()
