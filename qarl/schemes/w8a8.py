"""w8a8: int8 weights and activations, as compressed-tensors' preset W8A8."""

from __future__ import annotations

from qarl.schemes.eight_bits import EightBits
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register


@register
class W8A8(EightBits):
    """int8 weights and activations."""

    name = "w8a8"
    order = 2
    format = "int-quantized"
    type = "int"
    codes = "int8"
    plan = PlanTerms(
        rate="int8",
        compiled=False,
        forward=BeyondProducts(dense_input=2, expert_token=3, expert_inner=3),
        backward=BeyondProducts(
            dense_input=6,
            dense_weight=4,
            expert_token=3,
            expert_inner=14,
            expert_weight=6,
        ),
    )
