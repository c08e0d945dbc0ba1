"""w4a8: the int4 weights of w4a16, and int8 activations with one scale per token.

It equals compressed-tensors' preset W4A8 but for the group size and the format: compressed-tensors would choose
int-quantized, which needs one byte per int4 value instead of half a byte.
"""

from __future__ import annotations

from qarl.errors import UserError
from qarl.schemes.base import QuantArgs
from qarl.schemes.eight_bits import per_token
from qarl.schemes.int4_groups import Int4Groups
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.registry import register


@register
class W4A8(Int4Groups):
    """The weights of w4a16, and int8 activations with one scale per token."""

    name = "w4a8"
    order = 4
    cpu_flags = ("avx512_vnni",)
    cpu_flags_reason = "without VNNI the int8 products of PyTorch are not exact"
    no_gpu_kernel = (
        "on GPUs of capability 9.0 vLLM rounds activations and group scales to FP8 (e4m3), also where the checkpoint "
        "says int8, and on other GPUs it has no kernel"
    )
    """vLLM's `CompressedTensorsConfig._is_fp8_w4a8` does not look at the type of the activations, and
    `CutlassW4A8LinearKernel` multiplies float8_e4m3fn."""
    export_limit = (
        "Plain vLLM does not compute w4a8: from this folder it computes W4A16 on a CPU, rounds activations to FP8 on a "
        "GPU of capability 9.0, and refuses it on other GPUs"
    )

    def engine_refusal(self, kernels: KernelChoice) -> UserError | None:
        if kernels.own_low_bit:
            return None
        on_cpus = "from such a checkpoint vLLM computes W4A16 on CPUs, without a warning"
        return UserError(
            "w4a8 rollouts are refused",
            where=f"quant.scheme=w4a8 with quant.kernels={kernels}",
            why=f"{on_cpus}; {self.no_gpu_kernel}",
            fix="set quant.kernels=qarl (dense models on a CPU), or use w4a16 or w8a8",
        )

    @property
    def input_activations(self) -> QuantArgs:
        return per_token("int")
