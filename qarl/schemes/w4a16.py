"""w4a16: int4 weights in groups, BF16 activations. It equals compressed-tensors' preset W4A16 but for the group size.

verl's `qat.mode: w4a16` is a different scheme: NVFP4 with groups of 16.
"""

from __future__ import annotations

from collections.abc import Mapping

from qarl.errors import UserError
from qarl.schemes.base import Cpu
from qarl.schemes.int4_groups import Int4Groups
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register


@register
class W4A16(Int4Groups):
    """Symmetric int4 weights with one BF16 scale per group, and BF16 activations."""

    name = "w4a16"
    order = 1
    plan = PlanTerms(
        efficiency=0.55,
        forward=BeyondProducts(dense_weight=4),
        backward=BeyondProducts(dense_weight=4, expert_weight=8.05),
    )
    cpu_flags = ("avx512f", "avx512_vnni")
    cpu_flags_reason = "vLLM's W4A16 kernel for CPUs needs AVX512 with VNNI"
    cpu_multiple = 32

    def cpu_refusal(self, cpu: Cpu, environment: Mapping[str, str]) -> UserError | None:
        if cpu.tiles and environment.get("VLLM_CPU_INT4_W4A8", "0") != "0":
            return UserError(
                "VLLM_CPU_INT4_W4A8 is set, and this CPU has AMX",
                where=f"quant.scheme={self.name}",
                why="vLLM would round the activations to int8 and multiply integers, but the trainer would not",
                fix="unset VLLM_CPU_INT4_W4A8, so that QaRL sets it to 0",
            )
        return super().cpu_refusal(cpu, environment)
