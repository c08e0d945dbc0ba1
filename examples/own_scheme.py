"""A quantization scheme of your own: int4 weights whose codes are symmetric, -7 to 7, instead of -8 to 7.

    qarl train config=quickstart.yaml plugins=[examples/own_scheme.py] quant.scheme=w4a16_symmetric

The scale of a group is absmax / 7, so that neither the smallest nor the largest weight is clamped. Tensors on the wire,
and so kernels, writers and vLLM, are those of w4a16. This file is all that it takes. `qarl.schemes.base.Scheme`
documents what else may be said of a scheme: other tensors, refusals of machines and trainers, limits of an export.
"""

from __future__ import annotations

from qarl.schemes import Grid, register
from qarl.schemes.w4a16 import W4A16


@register
class SymmetricW4A16(W4A16):
    """int4 weights in groups, scale absmax / 7, and BF16 activations."""

    name = "w4a16_symmetric"
    order = 100  # after QaRL's own in lists
    grid = Grid(half_range=7.0, lowest=-7, highest=7)
