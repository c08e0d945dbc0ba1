"""Casts and dot products of the Triton kernels, with the same bits on a GPU and under Triton's interpreter.

With TRITON_INTERPRET=1 (read when a kernel is defined) kernels run in NumPy, on a machine without a GPU. In Triton 3.6
to 3.9 the interpreter is wrong in four ways:

- `tl.dot` of BF16 operands multiplies their raw bits (triton-lang/triton#11584)
- casts from FP32 to BF16 truncate
- casts to and from subnormal BF16 numbers are wrong
- casts from FP32 to FP8 round differently

On a GPU the functions here use the instruction. Under the interpreter they get the same result by integer arithmetic.
Kernels never compute on BF16 tensors: they call `to_fp32` on load and `to_bf16` on store.

Two rules make bits independent of the Triton release. Launch with `**LAUNCH`, because 3.10 changes the default for
fusing a * b + c. Write `tl.div_rn` and `tl.sqrt_rn`, because `/` and `tl.sqrt` are approximate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from qarl.kernels.base import capability

INTERPRETED: bool = knobs.runtime.interpret
"""Whether the kernels of this process run under the interpreter."""

LAUNCH: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Options for every launch."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_bf16(x):
    """FP32 -> FP32, rounded half to even to a BF16 value. Under the interpreter the bits of a NaN may change."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        return (rounded & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_bf16(x):
    """FP32 -> BF16, half to even."""
    if _INTERPRETED:
        bits = round_bf16(x).to(tl.uint32, bitcast=True)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_fp32(x):
    """Any type that kernels load -> FP32, exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def e4m3_bits(x, HARDWARE: tl.constexpr):
    """FP32 in -448..448 -> the bits of the nearest float8_e4m3fn, half to even, as uint8. NaN gives NaN.

    `HARDWARE`: use the conversion instruction, if `has_e4m3(device)`. Without it, normal numbers are rounded by
    dropping the low 20 bits. Numbers below 2**-6 are added to 2**14, and the low bits of the sum are the code.
    """
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    ) & 0xFF
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(code, HARDWARE: tl.constexpr):
    """float8_e4m3fn bits, as uint8 -> FP32, exact.

    The bits are moved to their places in an FP32, and the result is multiplied by 2**120.
    """
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = code.to(tl.uint32)
    value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b for BF16, int8 or e4m3 operands, summed in FP32 (int8: in int32)."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(to_fp32(a), to_fp32(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, out_dtype=acc.dtype)


def has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on `device` can use the float8_e4m3fn conversion instruction.

    GPUs before capability 8.9 do not have it, and the interpreter's version rounds differently.
    """
    return not INTERPRETED and torch.version.hip is None and capability(device) >= (8, 9)
