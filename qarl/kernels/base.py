"""What a kernel for linears offers. Kernels are classes that are never instantiated.

`qarl.kernels.registry` chooses among them. Those for layers of experts are in `qarl.kernels.experts.grouped`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A layout of `weight_packed` and `weight_scale`, of a weight [N, K] or a stack [E, N, K].

    If a weight is split along its first dimension into parts that fit, the layouts of the parts, one after another, are
    that of the weight.

    `codes`: name of the tensor with the codes. `fits`: whether a part of this shape has the layout. `convert`: makes
    the layout from wire tensors that fit, with the same first dimension. `restore`: its inverse.
    """

    codes: str
    fits: Callable[[tuple[int, ...]], bool]
    convert: Callable[[Tensors], dict[str, torch.Tensor]]
    restore: Callable[[Tensors], dict[str, torch.Tensor]]


class Kernel:
    """`layout`: a layout of int4 weights that `prepare` also accepts, so that FSDP2 can gather it, or None."""

    name: ClassVar[str]
    layout: ClassVar[Layout | None] = None


class LinearKernel(Kernel):
    """A kernel that computes y = x Q(W)^T + b. By default it multiplies unquantized activations.

    group_sizes              the supported group sizes, or None if all are supported
    computes_input_gradient  whether `backward_input` exists. If not, dX is the product with the dequantized weight
    """

    group_sizes: ClassVar[tuple[int, ...] | None] = None
    computes_input_gradient: ClassVar[bool] = False

    @staticmethod
    def unavailable(scheme_name: str, device: torch.device, shape: tuple[int, int]) -> str | None:
        """Return why this kernel does not support the scheme on weights of `shape` [N, K] here, or None if it does."""
        raise NotImplementedError

    @staticmethod
    def prepare(tensors: Tensors) -> Any:
        """Convert the wire tensors of one weight to what `linear` reads. This runs once per optimizer step."""
        raise NotImplementedError

    @classmethod
    def prepare_gathered(cls, tensors: Tensors) -> Any:
        """Do the same for a weight that FSDP2 gathers in every forward. Some kernels have a cheaper way."""
        return cls.prepare(tensors)

    @classmethod
    def backward_input(cls, grad: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Return dX BF16 [M, K] from grad BF16 [M, N], any strides, and the wire tensors."""
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
