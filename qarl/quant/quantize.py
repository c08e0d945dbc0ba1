"""The one quantizer: its tensors feed the trainer's GEMM, the wire to vLLM and the checkpoint on disk.

The grid is compressed-tensors' own (`calculate_qparams`, `quantize`, `pack_to_int32`), equal to it bit for bit: for
int4, scale = absmax / 7.5 in the weight's dtype (a scale of zero becomes the dtype's eps, so an all-zero group has
codes of zero and a finite scale), code = round-half-even(clamp(weight / scale)) with the quotient rounded to the
weight's dtype first, stored with offset 8, eight to an int32, lowest nibble first.

It runs on every weight after every optimizer step, so the steps are theirs and the arithmetic is not, for a third of
the time. Three things make that exact: non-negative floats order as their bits do; adding a constant whose unit in the
last place is one rounds half to even and leaves code + 8 in the low bits; clamping commutes with rounding, the bounds
being integers. Eager only: a compiler that keeps BF16 intermediates in FP32 would change the grid. Views of wider
integers assume a little-endian machine, as `weight_packed` read as bytes does everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.quant.scheme import Scheme
from qarl.quant.tensor import QuantizedTensor

HALF_RANGE = 7.5
"""Half the 15 steps from -8 to 7. An element of -absmax gets code -8, and one of +absmax is clamped from 8 to 7."""


class _Bits(NamedTuple):
    """One float dtype as integers: `base` are the bits of `rounder` - 8, whose low four bits are zero."""

    integer: torch.dtype
    magnitude_mask: int
    rounder: float
    base: int


# Each rounder is 8 above the power of two (for float32, 1.5 times one) from which floats are whole numbers.
_BITS = {
    torch.bfloat16: _Bits(torch.int16, 0x7FFF, 128.0 + 8, 0x4300),
    torch.float16: _Bits(torch.int16, 0x7FFF, 1024.0 + 8, 0x6400),
    torch.float32: _Bits(torch.int32, 0x7FFFFFFF, 1.5 * 2**23 + 8, 0x4B400000),
}


@torch.no_grad()
def quantize(weight: Tensor, scheme: Scheme, *, name: str = "weight") -> QuantizedTensor:
    """Quantizes `weight` [N, K] (bfloat16, float16 or float32; any strides); `name` is its name in errors.

    Give it what the forward sees: for an FP32 master under a BF16 forward, the BF16 cast. The scale has the dtype of
    `weight`, and the wire format is BF16.
    Raises UserError when the shape does not fit the scheme or `weight` holds a NaN or an Inf (one device
    synchronization), ValueError for a scheme that is not weight-quantized or a dtype that has no grid here.
    """
    if scheme.weights is None or scheme.format != "pack-quantized" or scheme.weights.group_size is None:
        raise ValueError(f"quantize makes int4 groups; scheme {scheme.name!r} has none")
    if weight.dtype not in _BITS:
        raise ValueError(f"{name} is {weight.dtype}; quantize takes bfloat16, float16 and float32")
    if weight.ndim != 2:
        raise ValueError(f"{name} has {weight.ndim} dimensions; quantize takes a [N, K] matrix")
    rows, cols = weight.shape
    problem = scheme.check_shape(name, rows, cols)
    if problem:
        raise UserError(
            problem,
            where=f"parameter {name}",
            fix="set quant.group_size to a divisor of the input features, or add the layer to quant.ignore",
        )
    groups = weight.detach().contiguous().view(rows, -1, scheme.weights.group_size)
    scale = _scale(groups, name)
    tensors = {
        "weight_packed": _pack(_codes(groups, scale).view(rows, cols)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, cols], dtype=torch.int64, device="cpu"),
    }
    return QuantizedTensor(scheme=scheme, shape=(rows, cols), tensors=tensors)


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`quantized.dequantize(dtype)`: the [N, K] weight that the low-bit GEMM multiplies by."""
    return quantized.dequantize(dtype)


def _scale(groups: Tensor, name: str) -> Tensor:
    """[N, K/g] in the dtype of `groups` [N, K/g, g]. The magnitudes are compared as integers; NaN sorts above Inf."""
    bits = _BITS[groups.dtype]
    absmax = (groups.view(bits.integer) & bits.magnitude_mask).amax(-1).view(groups.dtype)
    if not torch.isfinite(absmax).all():
        count = int((~torch.isfinite(groups)).sum())
        raise UserError(
            f"{name} holds {count} values that are NaN or Inf, of {groups.numel()}",
            where=f"parameter {name}",
            why="such a weight has no int4 scale, and one NaN in the engine stays in its KV cache",
            fix="lower optim.lr or actor.grad_clip, or check the checkpoint the run started from",
        )
    scale = absmax.div_(HALF_RANGE)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Code + 8, in 0..15, as int16 [N, K/g, g]."""
    bits = _BITS[groups.dtype]
    rounded = torch.div(groups, scale.unsqueeze(-1)).add_(bits.rounder).view(bits.integer)
    return rounded.clamp_(bits.base, bits.base + 15).bitwise_and_(0xF).to(torch.int16)


def _pack(codes: Tensor) -> Tensor:
    """int32 [N, K/8] from int16 [N, K] in 0..15: four codes at a time are moved together inside an int64."""
    lanes = codes.view(torch.int64)
    lanes.bitwise_or_(lanes >> 12)
    lanes.bitwise_or_(lanes >> 24)
    return lanes.view(torch.int16)[:, ::4].contiguous().view(torch.int32)
