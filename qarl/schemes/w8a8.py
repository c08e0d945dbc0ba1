"""w8a8: int8 weights and activations, as compressed-tensors' preset W8A8."""

from __future__ import annotations

from qarl.schemes.eight_bits import EightBits
from qarl.schemes.registry import register


@register
class W8A8(EightBits):
    """int8 weights and activations."""

    name = "w8a8"
    order = 2
    format = "int-quantized"
    type = "int"
    codes = "int8"
