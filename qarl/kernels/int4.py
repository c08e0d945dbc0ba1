"""Read the int4 wire format: eight values in an int32, lowest nibble first, stored with offset +8."""

from __future__ import annotations

import torch

VALUES_PER_INT32 = 8


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8] -> int8 [N, K] in -8..7."""
    pairs = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((pairs & 0xF, pairs >> 4), dim=-1)
    return nibbles.view(torch.int8).sub_(8).view(packed.shape[0], -1)


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return [N, K] in `dtype`: value times scale, rounded to the scale's dtype, then cast.

    This equals compressed-tensors' `dequantize`. For BF16 scales it also equals the operand of vLLM's CPU kernel,
    `bf16(float(q - 8) * float(scale))`.
    """
    codes = unpack_int4(packed)
    values = codes.to(scale.dtype).view(*scale.shape, -1).mul_(scale.unsqueeze(-1))
    return values.view(codes.shape).to(dtype)
