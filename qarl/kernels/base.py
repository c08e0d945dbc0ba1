"""What a kernel for linears, or for layers of experts, offers. Kernels are classes that are never instantiated.

`qarl.kernels.registry` and `qarl.kernels.experts.fused` choose among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from qarl.kernels.experts.grouped import ExpertsShape
    from qarl.kernels.layouts import Layout

Tensors = Mapping[str, torch.Tensor]


class Kernel:
    """`layout`: a layout of int4 weights that `prepare` also accepts, so that FSDP2 can gather it, or None."""

    name: ClassVar[str]
    layout: ClassVar[Layout | None] = None
    prepare: ClassVar[Callable[..., Any]]
    """Convert wire tensors to what the kernel reads. This runs once per optimizer step."""

    @classmethod
    def prepare_gathered(cls, *tensors: Tensors) -> Any:
        """Do the same as `prepare` for weights that FSDP2 gathers in every forward. Some kernels have a cheaper way."""
        return cls.prepare(*tensors)


class LinearKernel(Kernel):
    """A kernel that computes y = x Q(W)^T + b. By default it multiplies unquantized activations.

    group_sizes      the supported group sizes, or None if all are supported
    backward_input   (grad BF16 [M, N] of any strides, wire tensors) -> dX BF16 [M, K]. None: dX is the product with the
                     dequantized weight
    """

    group_sizes: ClassVar[tuple[int, ...] | None] = None
    backward_input: ClassVar[Callable[[torch.Tensor, Tensors], torch.Tensor] | None] = None

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        """Return why this kernel does not support the scheme on weights of `shape` [N, K] here, or None if it does."""
        raise NotImplementedError

    @classmethod
    def linear(cls, x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x BF16 [M, K], rows may be strided -> BF16 [M, N], a new tensor. `prepared`: what `prepare` returned."""
        raise NotImplementedError

    @classmethod
    def dequantized_input(cls, x: torch.Tensor) -> torch.Tensor:
        """Return the activations BF16 [M, K] that `linear` multiplies for this x."""
        return x

    @staticmethod
    def dequantized_weight(prepared: Any) -> torch.Tensor | None:
        """Return the BF16 weight [N, K] for the backward, if `prepared` contains it, or None."""
        return None


class ExpertsKernel(Kernel):
    """A kernel for layers of experts. `prepare` takes the stacked wire tensors of gate_up and down."""

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: ExpertsShape, group_size: int | None) -> str | None:
        """Return why this kernel cannot be used for experts of this scheme and shape here, or None if it can."""
        raise NotImplementedError

    @classmethod
    def forward(
        cls, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, prepared: Any
    ) -> torch.Tensor:
        """x [T, H] BF16, FP32 weights and int32 ids [T, k] -> [T, H] BF16, a new tensor."""
        raise NotImplementedError

    @staticmethod
    def quantize(scheme_name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize x BF16 [M, K] as this kernel does for an 8-bit scheme.

        Return values [M, K] and FP32 scales [M, 1].
        """
        raise NotImplementedError
