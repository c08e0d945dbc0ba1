"""bf16: nothing is quantized."""

from __future__ import annotations

from qarl.schemes.base import Scheme
from qarl.schemes.registry import register


@register
class BF16(Scheme):
    """The weights and activations of the model, in its own dtype."""

    name = "bf16"
    order = 0


UNQUANTIZED: Scheme = BF16()
"""The scheme of whatever is not quantized. Ask a scheme for `quantized`; do not compare it with this one."""
