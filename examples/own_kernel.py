"""A linear kernel of your own: W4A16 with products in FP64, so that the order of the sums no longer matters.

    qarl train config=quickstart.yaml plugins=[examples/own_kernel.py] quant.kernels=qarl

With `quant.kernels=qarl` vLLM and the trainer run the same kernel. On a CPU QaRL has such a kernel only for W4A8, and
this file adds one for W4A16. It is slow, and shows what the rounding of the engine's own sums costs.
`qarl.kernels.base.LinearKernel` documents what a kernel may say of itself.
"""

from __future__ import annotations

import torch

from qarl.kernels.base import LinearKernel, PreparedWeight, Tensors, bf16_bytes
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.registry import register
from qarl.schemes.base import INT4_BF16, Scheme
from qarl.schemes.kernel_choice import KernelChoice


@register
class ExactW4A16Linear(LinearKernel):
    """Dequantize once to BF16, multiply in FP64, and round once."""

    name = "exact_w4a16"
    operands = INT4_BF16
    options = (KernelChoice.QARL,)
    holds_dequantized = True

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None if device.type == "cpu" else f"runs on cpu, not on {device.type}"

    @classmethod
    def prepared_bytes(cls, scheme: Scheme, shape: tuple[int, int]) -> int:
        return bf16_bytes(shape)

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedWeight:
        scale = tensors["weight_scale"]
        return PreparedWeight(dequantize_int4(tensors["weight_packed"], scale), scale.new_empty(0))

    @staticmethod
    def dequantized_weight(prepared: PreparedWeight) -> torch.Tensor:
        return prepared.weight

    @classmethod
    def linear(
        cls, x: torch.Tensor, prepared: PreparedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = x.double() @ prepared.weight.double().t()
        if bias is not None:
            y += bias.double()
        return y.to(x.dtype)
