"""bf16: nothing is quantized."""

from __future__ import annotations

from qarl.schemes.base import Scheme
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register


@register
class BF16(Scheme):
    """No quantization. Weights and activations stay in the dtype of the model."""

    name = "bf16"
    order = 0
    plan = PlanTerms(
        efficiency=0.65,
        forward=BeyondProducts(expert_token=2, expert_hidden=22, expert_inner=10),
        backward=BeyondProducts(expert_token=4, expert_hidden=32, expert_inner=26),
    )


UNQUANTIZED: Scheme = BF16()
"""The scheme of whatever is not quantized. Ask a scheme for `quantized`; do not compare it with this one."""
