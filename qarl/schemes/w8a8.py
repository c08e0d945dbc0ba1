"""w8a8: int8 weights and activations, as compressed-tensors' preset W8A8."""

from __future__ import annotations

from collections.abc import Collection

from qarl.errors import UserError
from qarl.schemes.base import Grid
from qarl.schemes.eight_bits import BACKWARD, EightBits
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.plan_terms import BeyondProducts, PlanTerms
from qarl.schemes.registry import register

_CUTLASS = "CutlassInt8ScaledMMLinearKernel"
"""vLLM's class for int8 products on GPUs. If it is disabled, vLLM chooses another one."""


@register
class W8A8(EightBits):
    """int8 weights with one scale per output channel, and int8 activations with one per token."""

    name = "w8a8"
    order = 2
    format = "int-quantized"
    type = "int"
    codes = "int8"
    grid = Grid(half_range=127.5, lowest=-128, highest=127)
    plan = PlanTerms(
        rate="int8",
        forward=BeyondProducts(dense_input=2, expert_token=3, expert_inner=3),
        backward=BACKWARD,
    )
    cpu_flags = ("avx512_vnni",)
    cpu_flags_reason = (
        "without VNNI the int8 products of vLLM and PyTorch are not exact and not equal"
    )
    repacked_on_cpus = True  # in oneDNN's layout
    experts_repacked_on_cpus = True
    cpu_adapter_limit = (
        "On a CPU without AMX, plain vLLM cannot start with this folder and an adapter"
    )

    def gpu_refusal(
        self, capability: int, kernels: KernelChoice, disabled_kernels: Collection[str]
    ) -> UserError | None:
        """Also refuse GPUs after 9.0. vLLM chooses CUTLASS on any GPU from 8.0 on, but its int8 products end with 9.0
        (vLLM's csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c3x_sm100.cu and _sm120.cu)."""
        refusal = super().gpu_refusal(capability, kernels, disabled_kernels)
        cutlass = kernels.by_engine and _CUTLASS not in disabled_kernels
        if refusal or not cutlass or capability < 100:
            return refusal
        return UserError(
            f"vLLM has no int8 products for compute capability {capability / 10}",
            where=f"quant.scheme={self.name}",
            why="vLLM's CUTLASS kernels support int8 only up to capability 9.0, and fail at start",
            fix="set quant.scheme=fp8, or quant.kernels=qarl",
        )

    def gpu_experts_refusal(self, where: str, kernels: KernelChoice) -> UserError | None:
        """The vLLM of requirements/gpu.lock chooses `TritonExperts`, whose `apply` refuses the int8 rows that it is
        given. `qarl.vllm_versions` says which release takes them. QaRL's own kernel takes the place of vLLM's."""
        if kernels.own_low_bit:
            return None
        return UserError(
            "vLLM has no int8 products for experts on GPUs",
            where=where,
            why="the vLLM of requirements/gpu.lock runs them with TritonExperts, which refuses int8 activations as the "
            "engine starts",
            fix="set quant.kernels=qarl, or quant.scheme=fp8 or w4a16",
        )
