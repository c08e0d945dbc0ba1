"""w4a16: int4 weights in groups, BF16 activations. It equals compressed-tensors' preset W4A16 but for the group size.

verl's `qat.mode: w4a16` is a different scheme: NVFP4 with groups of 16.
"""

from __future__ import annotations

from qarl.schemes.int4_groups import Int4Groups
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register


@register
class W4A16(Int4Groups):
    """int4 weights in groups, BF16 activations."""

    name = "w4a16"
    order = 1
    plan = PlanTerms(
        efficiency=0.55,
        forward=BeyondProducts(dense_weight=4),
        backward=BeyondProducts(dense_weight=4, expert_weight=9.73),
    )
