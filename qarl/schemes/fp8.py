"""fp8: float8_e4m3fn weights and activations, as compressed-tensors' preset FP8_DYNAMIC."""

from __future__ import annotations

from qarl.schemes.eight_bits import EightBits
from qarl.schemes.registry import register


@register
class FP8(EightBits):
    """e4m3 weights and activations."""

    name = "fp8"
    order = 3
    format = "float-quantized"
    type = "float"
    codes = "float8_e4m3fn"
