"""A scheme with operands that QaRL does not have, and its kernels: int8 weights and BF16 activations, also for experts.

vLLM takes int8 weights only with int8 activations, so `input_activations` is as vLLM wants it, and `operands` says what
is multiplied. The two kernels are all that experts need, too."""

from __future__ import annotations

from typing import Any

import torch

from qarl.errors import UserError
from qarl.kernels.base import LinearKernel, PreparedWeight, Tensors
from qarl.kernels.registry import register as register_kernel
from qarl.schemes import register
from qarl.schemes.base import Operands
from qarl.schemes.kernel_choice import KernelChoice
from qarl.schemes.w8a8 import W8A8

INT8_BF16 = Operands("int8", "bf16")


@register
class W8A16(W8A8):
    """int8 weights, one scale a channel, and BF16 activations."""

    name = "w8a16"
    order = 100
    experts_repacked_on_cpus = False  # they stay as they are on the wire
    export_limit = "Plain vLLM rounds the activations to int8"

    @property
    def operands(self) -> Operands:
        return INT8_BF16

    def engine_refusal(self, kernels: KernelChoice) -> UserError | None:
        if kernels.own_low_bit:
            return None
        return UserError("w8a16 needs quant.kernels=qarl", where=f"quant.kernels={kernels}")


class _W8A16Linear(LinearKernel):
    operands = INT8_BF16
    multiplies_experts = True

    @classmethod
    def unavailable(cls, device: torch.device, shape: tuple[int, int]) -> str | None:
        return None

    @staticmethod
    def prepare(tensors: Tensors) -> PreparedWeight:
        return PreparedWeight(tensors["weight"], tensors["weight_scale"])


@register_kernel
class ReferenceW8A16Linear(_W8A16Linear):
    """In float64, rounded once."""

    name = "reference_w8a16"
    options = (KernelChoice.ENGINE, KernelChoice.QARL)
    reference = True

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        exact = x.double() @ (prepared.weight.double() * prepared.scale.double()).t()
        return (exact if bias is None else exact + bias.double()).to(x.dtype)


@register_kernel
class FastW8A16Linear(_W8A16Linear):
    """Each row alone in FP32, so that it does not depend on the others, and the scales at the end."""

    name = "fast_w8a16"
    options = (KernelChoice.QARL,)
    row_invariant = True

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        weight = prepared.weight.float()
        sums = torch.stack([weight @ row for row in x.float()])
        scaled = sums * prepared.scale.reshape(-1)
        return (scaled if bias is None else scaled + bias.float()).to(x.dtype)
