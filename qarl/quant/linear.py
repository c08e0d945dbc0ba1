"""QuantLinear: a linear whose forward uses the rollout engine's low-bit tensors, with a straight-through backward.

    forward   y  = GEMM_lowbit(x, Q(W)) + b    a kernel of qarl.kernels.registry, on the published tensors themselves
    backward  dX = dY Ŵ                        Ŵ: the forward's weight, dequantized to BF16
              dW = dYᵀ X̂,  db = sum of dY      X̂: the activations, dequantized to BF16 if the forward quantized them

The backward ignores the rounding of x and of the master weight (arXiv 2604.07853, section 3.1). verl's QAT (fake
quantization) also rounds the weight, but multiplies in BF16. `weight` stays an ordinary parameter, so optimizers,
checkpoints and FSDP need no change.

The weight is quantized when its storage or its autograd version counter has changed, so once per optimizer step. After
writing through `weight.data`, which does not advance the counter, call `invalidate_quantized`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qarl.errors import UserError
from qarl.kernels.registry import Choice, LinearKernel, choose_linear_kernel, own_backward_input
from qarl.quant.quantize import QuantizedTensor, quantize
from qarl.quant.scheme import Scheme
from qarl.quant.staleness import Mark
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
        self.scheme, self.qualified_name = scheme, qualified_name
        self.choice: Choice = choose_linear_kernel(
            scheme.name,
            device or linear.weight.device,
            (linear.out_features, linear.in_features),
            group_size=scheme.group_size,
            force=kernel,
            kernels=kernels,
        )
        self._generation = 0
        self._made_from: Mark | None = None
        self._quantized: QuantizedTensor | None = None
        self._dequantized: torch.Tensor | None = None
        self.prepared: Any = None

    @property
    def kernel(self) -> type[LinearKernel]:
        return self.choice.kernel

    @property
    def generation(self) -> int:
        """How many times the weight was quantized."""
        return self._generation

    def quantized(self) -> QuantizedTensor:
        """Return the low-bit tensors of the current weight, for the forward and the publisher."""
        if self._quantized is None or self.stale:
            self._quantized = self._make(self.weight.detach())
            self._made_from = Mark.of(self.weight)
            self._dequantized = None
        return self._quantized

    @torch.no_grad()
    def _make(self, weight: torch.Tensor) -> QuantizedTensor:
        """Quantize `weight`, and let the kernel prepare the result."""
        made = quantize(weight, self.scheme, name=f"{self.qualified_name}.weight")
        with phase("prepare"):
            self.prepared = self.kernel.prepare(made.tensors)
        self._generation += 1
        return made

    def make_ready(self) -> None:
        """Quantize the weight for a forward, if it has changed."""
        self.quantized()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y [M, N] BF16 from x [M, K] BF16."""
        return self.kernel.linear(x, self.prepared, bias)

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return dX = dY Ŵ, BF16 [M, K], from `grad` [M, N]. Some kernels compute it from the low-bit tensors."""
        own = own_backward_input(self.kernel)
        return grad @ self.dequantized if own is None else own(grad, self.quantized().tensors)

    @property
    def dequantized(self) -> torch.Tensor:
        """Ŵ [N, K] in BF16, for kernels that do not compute dX. It is made in the first backward after an update."""
        if self._dequantized is None:
            quantized = self.quantized()
            held = getattr(self.kernel, "dequantized_weight", None)
            self._dequantized = held(self.prepared) if held else quantized.dequantize(torch.bfloat16)
        return self._dequantized

    def invalidate(self) -> None:
        """Drop the quantized tensors. The next use makes them again."""
        self._made_from = self._quantized = self._dequantized = self.prepared = None

    @property
    def stale(self) -> bool:
        """Whether the weight was changed or replaced since it was quantized."""
        return self._made_from is None or not self._made_from.holds_for(self.weight)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the quantized tensors out of copies and pickles, because a kernel may own their memory."""
        made = ("_made_from", "_quantized", "_dequantized", "prepared")
        return {**self.__dict__, **dict.fromkeys(made)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype != torch.bfloat16:
            raise UserError(
                f"{self.qualified_name} got {input.dtype} activations",
                why="the low-bit kernels multiply BF16 activations, as the rollout engine does",
                fix="run the model in bfloat16, without autocast to a different dtype",
            )
        self.make_ready()
        x = input.reshape(-1, self.in_features)
        y = _StraightThroughLinear.apply(x, self.weight, self.bias, self)
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}, kernel={self.kernel.name}"
