"""QuantLinear: the forward multiplies by the low-bit tensors the rollout engine was given; the backward is
straight-through.

    forward   y  = GEMM_lowbit(x, Q(W)) + b    a kernel of qarl.kernels.registry, on the published tensors themselves
    backward  dX = dY Ŵ                        Ŵ is the BF16 dequantized weight: what the forward multiplied by
              dW = dYᵀ X̂,  db = sum of dY      X̂ too: x, or in BF16 the activations as the forward quantized them;
                                               straight through both roundings, onto x and the master weight

(arXiv 2604.07853, section 3.1; fake quantization, as in verl's QAT, rounds the weight but multiplies in BF16 instead.)
`weight` stays an ordinary parameter under its own state-dict key, so optimizers, checkpoints and FSDP do not notice.

The quantized tensors are made once per optimizer step: they are keyed by the weight's storage and autograd version
counter, which every in-place update advances. Writing through `weight.data` bypasses that counter: call
`invalidate_quantized` then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.registry import Choice, LinearKernel, choose_linear_kernel, own_backward_input
from qarl.quant.marks import Mark
from qarl.quant.phases import phase
from qarl.quant.quantize import quantize
from qarl.quant.scheme import Scheme
from qarl.quant.tensor import QuantizedTensor


class _StraightThroughLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: QuantLinear) -> Any:
        ctx.save_for_backward(x)
        ctx.layer, ctx.generation = layer, layer.generation
        return layer.kernel.linear(x, layer.prepared, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (x,), layer = grad_outputs, ctx.saved_tensors, ctx.layer
        if layer.generation != ctx.generation or layer.stale:
            raise RuntimeError(f"{layer.qualified_name}.weight changed between its forward and its backward")
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return (
            layer.input_gradient(grad) if need_x else None,
            grad.t() @ layer.kernel.dequantized_input(x) if need_weight else None,
            grad.sum(0) if need_bias else None,
            None,
        )


class QuantLinear(nn.Linear):
    """`nn.Linear` whose forward is a low-bit GEMM. Weight [N, K] and activations [..., K] are BF16."""

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        *,
        qualified_name: str,
        kernel: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Takes over the parameters of `linear` (no copy). `qualified_name` is used in errors; `kernel` forces one.

        `device`: where the forward will run, if that is not where the weight is now.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme, self.qualified_name = scheme, qualified_name
        self.choice: Choice = choose_linear_kernel(
            scheme.name,
            device or linear.weight.device,
            (linear.out_features, linear.in_features),
            group_size=scheme.group_size,
            force=kernel,
        )
        self.generation = 0
        self._made_from: Mark | None = None
        self._quantized: QuantizedTensor | None = None
        self._dequantized: torch.Tensor | None = None
        self.prepared: Any = None

    @property
    def kernel(self) -> type[LinearKernel]:
        return self.choice.kernel

    def quantized(self) -> QuantizedTensor:
        """The low-bit tensors of the weight as it is now: what the forward multiplies by and the publisher sends."""
        if self._quantized is None or self.stale:
            with torch.no_grad():
                self._quantized = quantize(self.weight.detach(), self.scheme, name=f"{self.qualified_name}.weight")
                with phase("prepare"):
                    self.prepared = self.kernel.prepare(self._quantized.tensors)
            self._made_from = Mark.of(self.weight)
            self._dequantized = None
            self.generation += 1
        return self._quantized

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """dX = dY Ŵ, BF16 [M, K] from [M, N]: by the kernel, from its low-bit weight, if it can."""
        own = own_backward_input(self.kernel)
        return grad @ self.dequantized if own is None else own(grad, self.prepared)

    @property
    def dequantized(self) -> torch.Tensor:
        """Ŵ [N, K] in BF16, made at the first backward after an update, and held for kernels without their own dX."""
        if self._dequantized is None:
            self._dequantized = self.quantized().dequantize(torch.bfloat16)
        return self._dequantized

    def invalidate(self) -> None:
        """Forget the quantized tensors; the next use makes them again."""
        self._made_from = self._quantized = self._dequantized = self.prepared = None

    @property
    def stale(self) -> bool:
        """Whether the weight was changed, or replaced, since its quantized tensors were made."""
        return self._made_from is None or not self._made_from.holds_for(self.weight)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the quantized tensors out and make them again: a kernel may own their memory."""
        made = ("_made_from", "_quantized", "_dequantized", "prepared")
        return {**self.__dict__, **dict.fromkeys(made)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype != torch.bfloat16:
            raise UserError(
                f"{self.qualified_name} got {input.dtype} activations",
                why="the low-bit kernels multiply BF16 activations, as the rollout engine does",
                fix="run the model in bfloat16, without autocast to another dtype",
            )
        self.quantized()
        x = input.reshape(-1, self.in_features)
        y = _StraightThroughLinear.apply(x, self.weight, self.bias, self)
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}, kernel={self.kernel.name}"
