"""w4a8: the int4 weights of w4a16, and int8 activations with one scale per token.

It equals compressed-tensors' preset W4A8 but for the group size and the format: compressed-tensors would choose
int-quantized, which needs one byte per int4 value instead of half a byte.
"""

from __future__ import annotations

from qarl.schemes.base import QuantArgs
from qarl.schemes.eight_bits import per_token
from qarl.schemes.int4_groups import Int4Groups
from qarl.schemes.registry import register


@register
class W4A8(Int4Groups):
    """int4 weights in groups, int8 activations."""

    name = "w4a8"
    order = 4
    engine_computes = (
        "from such a checkpoint vLLM computes W4A16 on CPUs, without a warning; on GPUs of capability 9.0 vLLM rounds "
        "activations and group scales to FP8 (e4m3), also where the checkpoint says int8, and on other GPUs it has no "
        "kernel"
    )
    """`CompressedTensorsConfig._is_fp8_w4a8` of vLLM 0.24.0 does not look at the type of the activations, and
    `CutlassW4A8LinearKernel` multiplies float8_e4m3fn."""

    @property
    def input_activations(self) -> QuantArgs:
        return per_token("int")
