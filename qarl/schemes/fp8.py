"""fp8: float8_e4m3fn weights and activations, as compressed-tensors' preset FP8_DYNAMIC."""

from __future__ import annotations

from qarl.errors import UserError
from qarl.schemes.base import Grid
from qarl.schemes.eight_bits import BACKWARD, EightBits
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register


@register
class FP8(EightBits):
    """e4m3 weights with one scale per output channel, and e4m3 activations with one per token."""

    name = "fp8"
    order = 3
    format = "float-quantized"
    type = "float"
    codes = "float8_e4m3fn"
    grid = Grid(half_range=448.0, lowest=-448, highest=448)
    plan = PlanTerms(
        rate="fp8",
        forward=BeyondProducts(dense_input=2, expert_token=5, expert_hidden=2, expert_inner=3),
        backward=BACKWARD,
    )
    experts_repacked_on_cpus = True  # their codes are FP32 there
    capability = 89
    capability_reason = (
        "for FP8 products; on older GPUs vLLM leaves the activations in BF16 without a warning"
    )
    capability_fix = "set quant.scheme=w4a16, or use a newer GPU"

    def gpu_adapted_experts_refusal(self, where: str) -> UserError | None:
        return UserError(
            "FP8 experts cannot have adapters beside them on a GPU",
            where=where,
            why="an engine with adapters multiplies FP8 experts by Triton, and the trainer by CUTLASS",
            fix="set quant.scheme=w4a16",
        )
