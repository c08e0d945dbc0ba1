"""QuantLinear: a linear whose forward uses the rollout engine's low-bit tensors, with a straight-through backward.

    forward   y  = GEMM_lowbit(x, Q(W)) + b    a kernel of qarl.kernels.registry, on the published tensors themselves
    backward  dX = dY Ŵ                        Ŵ: the forward's weight, dequantized to BF16
              dW = dYᵀ X̂,  db = sum of dY      X̂: the activations, dequantized to BF16 if the forward quantized them

The backward ignores the rounding of x and of the master weight (arXiv 2604.07853, section 3.1). verl's QAT (fake
quantization) also rounds the weight, but multiplies in BF16. `weight` stays an ordinary parameter, so optimizers,
checkpoints and FSDP need no change.

The weight is quantized once per optimizer step (`qarl.quant.layer`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qarl.kernels.registry import choose_linear_kernel
from qarl.quant.layer import QuantLayer
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.scheme import Scheme
from qarl.quant.timing import phase


class _StraightThroughLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: QuantLinear) -> Any:
        ctx.save_for_backward(x)
        ctx.layer, ctx.generation = layer, layer.generation
        return layer.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (x,), layer = grad_outputs, ctx.saved_tensors, ctx.layer
        layer.check_unchanged(ctx.generation)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return (
            layer.input_gradient(grad) if need_x else None,
            grad.t() @ layer.kernel.dequantized_input(x) if need_weight else None,
            grad.sum(0) if need_bias else None,
            None,
        )


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` whose forward is a low-bit GEMM. Weight [N, K] and activations [..., K] are BF16."""

    WEIGHTS = ("weight",)
    MADE = ("_quantized", "_dequantized", "prepared")
    multiplies = "low-bit kernels"
    _quantized: QuantizedTensor | None
    _dequantized: torch.Tensor | None
    prepared: Any

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        *,
        qualified_name: str,
        kernel: str | None = None,
        kernels: str = "engine",
        device: torch.device | None = None,
    ) -> None:
        """Take over the parameters of `linear` without a copy.

        `qualified_name`: the name to show in errors. `kernel`: the only kernel to consider. `kernels`: a value of
        `quant.kernels`. `device`: where the forward will run, by default the device of the weight.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        choice = choose_linear_kernel(
            scheme.name,
            device or linear.weight.device,
            (linear.out_features, linear.in_features),
            group_size=scheme.group_size,
            force=kernel,
            kernels=kernels,
        )
        self._choose(scheme, qualified_name, choice)

    def quantized(self) -> QuantizedTensor:
        """Return the low-bit tensors of the current weight, for the forward and the publisher."""
        if self._quantized is None or self.stale:
            with torch.no_grad():
                made = quantize(self.weight.detach(), self.scheme, name=f"{self.qualified_name}.weight")
                with phase("prepare"):
                    self.prepared = self.kernel.prepare(made.tensors)
            self._quantized, self._dequantized = made, None
            self._mark()
        return self._quantized

    def make_ready(self) -> None:
        """Quantize the weight for a forward, if it has changed."""
        self.quantized()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y [M, N] BF16 from x [M, K] BF16."""
        return self.kernel.linear(x, self.prepared, bias)

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return dX = dY Ŵ, BF16 [M, K], from `grad` [M, N]. Some kernels compute it from the low-bit tensors."""
        if self.kernel.computes_input_gradient:
            return self.kernel.backward_input(grad, self.quantized().tensors)
        return grad @ self.dequantized

    @property
    def dequantized(self) -> torch.Tensor:
        """Ŵ [N, K] in BF16, for kernels that do not compute dX. It is made in the first backward after an update."""
        if self._dequantized is None:
            quantized = self.quantized()
            weight = self.kernel.dequantized_weight(self.prepared)
            self._dequantized = quantized.dequantize(torch.bfloat16) if weight is None else weight
        return self._dequantized

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.check_input(input.dtype)
        self.make_ready()
        x = input.reshape(-1, self.in_features)
        y = _StraightThroughLinear.apply(x, self.weight, self.bias, self)
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}, kernel={self.kernel.name}"
