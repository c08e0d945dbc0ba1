"""An expert layer with low-bit weights: its forward and its backward, and the kernels of our grouped products.

The layer computes y = sum over a token's experts of w * down(silu(gate(x)) * up(x)). The forward uses the rollout
engine's kernel if possible (`vllm_experts` in `qarl.kernels.cpu` and `qarl.kernels.cuda`), otherwise our grouped
products (`qarl.kernels.grouped`). The backward is straight-through and the same for all kernels. Ŵgu and Ŵd are the
dequantized weights of gate_up and down:

    y_e = a Ŵd^T, a = silu(g) * u, [g u] = x Ŵgu^T    computed again by our grouped products, from the wire tensors
    da  = (dy Ŵd)                                      w * da is the gradient of a; da · â that of router weight w
    dx  = sum over experts of [dg du] Ŵgu              in the router's order, without atomic additions
    dWd = (w dy)^T â, dWgu = [dg du]^T x̂              x̂, â: the forward's operands in BF16, dequantized if 8-bit

With Triton, dWd is dy^T (w â). a has fewer columns than dy, and the pass over memory that makes [dg du] makes w â too.

Products are in BF16 with FP32 sums. The values that the backward computes again can differ from the engine's forward in
the last BF16 bit. With many rows an expert, products multiply by a BF16 copy of a stack. A pass makes each copy once,
the backward multiplies by that of gate_up twice, and the two are never there together. A token's experts must all be
different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from qarl.kernels.base import ExpertsKernel, ExpertsShape, PreparedStacks, Tensors
from qarl.kernels.grouped import (
    Routing,
    Stack,
    combine,
    dequantized_rows,
    gathered,
    has_triton,
    input_gradient,
    product,
    route,
    swiglu,
    weight_gradient,
)
from qarl.kernels.linear_kernels import LINEAR_KERNELS, multiply_experts
from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import BF16_BF16, FP8_FP8, INT4_BF16, INT8_INT8, Operands, Scheme
from qarl.schemes.kernel_choice import KernelChoice


class LowBitExperts(NamedTuple):
    """One layer's experts: the stacked wire tensors for the backward, and `prepared`, a copy in the kernel's layout.

    Each attribute is read once per pass, so `qarl.quant.experts.ExpertsInOneCopy` computes it when it is read.
    """

    kernel: type[ExpertsKernel]
    gate_up: Tensors
    down: Tensors
    operands: Operands
    prepared: Any

    @classmethod
    def of(
        cls, kernel: type[ExpertsKernel], gate_up: Tensors, down: Tensors, operands: Operands
    ) -> LowBitExperts:
        """Prepare one layer's experts. `operands`: what its scheme multiplies."""
        return cls(kernel, gate_up, down, operands, kernel.prepare(gate_up, down, operands))


def fused_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up_weight: torch.Tensor | None,
    down_weight: torch.Tensor | None,
    experts: Any,
) -> torch.Tensor:
    """Compute BF16 [T, H] from x BF16 [T, H], `topk_weights` [T, k] and `topk_ids` [T, k], differentiably.

    The forward reads only `experts`, a `LowBitExperts` or an object with its attributes. The BF16 masters
    `gate_up_weight` [E, 2I, H] and `down_weight` [E, H, I] receive gradients. Pass None for them if no gradient is
    needed. There must be at least one token.
    """
    tokens = _Backward.apply(x, topk_weights, gate_up_weight, down_weight, topk_ids, experts)
    y: torch.Tensor = _Forward.apply(tokens, topk_weights.detach(), topk_ids, experts)
    return y


class _Forward(torch.autograd.Function):
    """The kernel. It saves nothing, and hands its gradient to `_Backward`.

    PyTorch's recomputation of a checkpointed block ends when it has recomputed the last saved tensor. In a block that
    ends with experts, such as Qwen3-MoE's, `_Backward` saves this tensor, so the kernel does not run again. If the
    block saves anything after the experts, it does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, experts: Any
    ) -> torch.Tensor:
        ids = topk_ids.to(torch.int32).contiguous()
        return experts.kernel.forward(
            x.contiguous(), topk_weights.float().contiguous(), ids, experts.prepared
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_outputs[0], None, None, None


class _Backward(torch.autograd.Function):
    """The experts' backward. Its forward returns `x`, and saves what the backward reads before the kernel runs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        gate_up_weight: torch.Tensor | None,
        down_weight: torch.Tensor | None,
        topk_ids: torch.Tensor,
        experts: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, topk_weights, topk_ids)
        ctx.experts = experts
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, topk_weights, topk_ids = ctx.saved_tensors
        gate_up = Stack(ctx.experts.gate_up, ctx.experts.operands)
        down = Stack(ctx.experts.down, ctx.experts.operands)
        need_x, need_router, need_gate_up, need_down = ctx.needs_input_grad[:4]
        routing = route(topk_ids, gate_up.experts)
        grad = grad_outputs[0][routing.token]
        grad_a = input_gradient(grad, down, routing.ends)
        down.drop_copy()
        again = _Recomputed.of(ctx.experts.kernel, x, gate_up, routing)
        router_weights = topk_weights.flatten().float()
        swiglu_backward = _swiglu_by_triton if has_triton(x.device) else _swiglu_by_pytorch
        gradients = swiglu_backward(again, grad, grad_a, router_weights, need_down)
        grad_router = grad_down = grad_gate_up = grad_x = None
        if need_router:
            grad_router = gradients.router.view(topk_weights.shape).to(topk_weights.dtype)
        if need_down:
            grad_down = weight_gradient(gradients.output, gradients.down_input, routing.ends)
        if need_x:
            rows = input_gradient(gradients.gate_up, gate_up, routing.ends)
            grad_x = combine(rows, routing, topk_ids.shape[1])
        gate_up.drop_copy()
        if need_gate_up:
            inputs = dequantized_rows(again.x, again.x_scale)
            grad_gate_up = weight_gradient(gradients.gate_up, inputs, routing.ends)
        return grad_x, grad_router, grad_gate_up, grad_down, None, None


@dataclass(frozen=True)
class _Recomputed:
    """Values of the forward by our grouped products, with rows sorted by expert.

    kernel     quantizes the activations
    operands   what the products multiply
    x          the input of gate and up [M, H], with the scales `x_scale` FP32 [M, 1] if it is 8-bit, else None
    gate_up    gate and up, BF16 [M, 2I]
    """

    kernel: Any
    operands: Operands
    routing: Routing
    x: torch.Tensor
    x_scale: torch.Tensor | None
    gate_up: torch.Tensor

    @classmethod
    def of(cls, kernel: Any, x: torch.Tensor, gate_up: Stack, routing: Routing) -> _Recomputed:
        """x BF16 [T, H]."""
        # Each token is quantized once for all its experts.
        x, scale = _multiplied(kernel, gate_up.operands, x)
        rows = gathered(x, routing.token)
        row_scale = None if scale is None else scale[routing.token]
        hidden = product(rows, row_scale, gate_up, routing.ends)
        return cls(kernel, gate_up.operands, routing, rows, row_scale, hidden)

    def down_input(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input of down_proj [M, I], and its scales [M, 1] if it is 8-bit."""
        return _multiplied(self.kernel, self.operands, swiglu(self.gate_up))


def _multiplied(
    kernel: Any, operands: Operands, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a product reads of x BF16 [M, K]: x itself, or 8-bit values and their FP32 scales [M, 1]."""
    if not operands.rounds_activations:
        return x, None
    quantized: tuple[torch.Tensor, torch.Tensor] = kernel.quantize(operands, x.contiguous())
    return quantized


@dataclass(frozen=True)
class _SwigluGradients:
    """What the backward computes between its products, with rows sorted by expert.

    gate_up               BF16 [M, 2I]: the gradient of gate and up
    router                FP32 [M]: that of the routing weights, in the order of `topk_ids`
    output, down_input    BF16 [M, H] and [M, I]: the gradient of down_proj is output^T down_input. One of the two
                          is multiplied by the routing weights
    """

    gate_up: torch.Tensor
    router: torch.Tensor
    output: torch.Tensor
    down_input: torch.Tensor


def _swiglu_by_triton(
    again: _Recomputed,
    grad: torch.Tensor,
    grad_a: torch.Tensor,
    router_weights: torch.Tensor,
    need_down: bool,
) -> _SwigluGradients:
    """`grad` BF16 [M, H] and `grad_a` BF16 [M, I]: gradients of an expert's output, and of down_proj's input before the
    routing weights FP32 [T k]. `need_down`: whether the result's `output` and `down_input` are used."""
    from qarl.kernels.triton.between_products import swiglu_backward

    order = again.routing.order
    a: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    if (
        again.x_scale is not None
    ):  # the kernel computes BF16 a itself, which costs less than to write and read it
        a, scale = again.down_input()
    fused = swiglu_backward(
        grad_a, again.gate_up, a, scale, router_weights, order, weighted=need_down
    )
    down_input = fused.hidden if fused.weighted is None else fused.weighted
    return _SwigluGradients(fused.hidden, fused.router, grad, down_input)


def _swiglu_by_pytorch(
    again: _Recomputed,
    grad: torch.Tensor,
    grad_a: torch.Tensor,
    router_weights: torch.Tensor,
    need_down: bool,
) -> _SwigluGradients:
    """The same in PyTorch."""
    order = again.routing.order
    a = dequantized_rows(*again.down_input())
    weight = router_weights[order, None]
    by_row = (grad_a.float() * a.float()).sum(1)
    router = torch.empty_like(by_row).index_put_((order,), by_row)
    if need_down:
        grad = (grad.float() * weight).to(grad.dtype)
    gate, up = again.gate_up.chunk(2, dim=1)
    gate_up = _silu_mul_backward(grad_a.float() * weight, gate, up)
    return _SwigluGradients(gate_up, router, grad, a)


def _silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gradients of gate and up, BF16 [M, 2I] with gate first, from `grad` FP32 [M, I]."""
    g = gate.float()
    u = up.float()
    sigmoid = g.sigmoid()
    slope = sigmoid * (1 + g * (1 - sigmoid))
    return torch.cat(((grad * u * slope).bfloat16(), (grad * g * sigmoid).bfloat16()), dim=1)


class _GroupedExperts(ExpertsKernel):
    """Experts computed by our grouped products. An expert's output is rounded to BF16. Outputs are weighted and summed
    in FP32, and the sum is rounded."""

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors, operands: Operands) -> PreparedStacks:
        """Return the wire tensors themselves."""
        return PreparedStacks(gate_up, down, operands)

    @classmethod
    def forward(
        cls,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        prepared: PreparedStacks,
    ) -> torch.Tensor:
        gate_up = Stack(prepared.gate_up, prepared.operands)
        down = Stack(prepared.down, prepared.operands)
        routing = route(topk_ids, gate_up.experts)
        values, scale = _multiplied(cls, gate_up.operands, x)
        each: Any = {"batch_invariant": cls.row_invariant}
        hidden = product(values, scale, gate_up, routing.ends, token=routing.token, **each)
        a, a_scale = _multiplied(cls, down.operands, swiglu(hidden))
        y = product(a, a_scale, down, routing.ends, **each)
        return combine(y, routing, topk_ids.shape[1], topk_weights)


class TritonExperts(_GroupedExperts):
    """Experts computed by the Triton kernels of qarl.kernels.triton."""

    name = "triton"
    operands = (INT4_BF16, INT8_INT8, FP8_FP8)

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return unavailable(scheme.operands, device)

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from qarl.kernels.triton.quantize import quantize_tokens

        return quantize_tokens(x, torch.int8 if operands == INT8_INT8 else torch.float8_e4m3fn)


class TritonInvariantExperts(TritonExperts):
    """The forward sums in one order for any number of rows an expert. quant.kernels=qarl gives it to trainer and
    engine (`qarl.rollout.vllm_plugin.cuda_experts`). The backward is that of all kernels."""

    name = "triton_batch_invariant"
    options = (KernelChoice.ENGINE, KernelChoice.QARL)
    device_type = "cuda"
    row_invariant = True


class ReferenceExperts(_GroupedExperts):
    """Experts computed one after another, with PyTorch's own products."""

    name = "reference"
    reference = True

    @classmethod
    def all_operands(cls) -> tuple[Operands, ...]:
        linears = (k for k in LINEAR_KERNELS if k.reference and k.multiplies_experts)
        return (*(kernel.operands for kernel in linears), BF16_BF16)

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return None

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        linear = next(kernel for kernel in multiply_experts(operands) if kernel.reference)
        quantized: tuple[torch.Tensor, torch.Tensor] = linear.quantize_input(x)
        return quantized
