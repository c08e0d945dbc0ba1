"""An expert layer with low-bit weights: its forward, its backward, and the products of routed tokens.

The layer computes y = sum over a token's experts of w * down(silu(gate(x)) * up(x)). The forward uses the rollout
engine's kernel if possible (`qarl.kernels.vllm_experts`), otherwise our grouped products. The backward is
straight-through and the same for all kernels. Ŵgu and Ŵd are the dequantized weights of gate_up and down:

    y_e = a Ŵd^T, a = silu(g) * u, [g u] = x Ŵgu^T    computed again by our grouped products, from the wire tensors
    da  = (dy Ŵd)                                      w * da is the gradient of a; da · â that of router weight w
    dx  = sum over experts of [dg du] Ŵgu              in the router's order, without atomic additions
    dWd = (w dy)^T â, dWgu = [dg du]^T x̂              x̂, â: the forward's operands in BF16, dequantized if 8-bit

With Triton, dWd is dy^T (w â). a has fewer columns than dy, and the pass over memory that makes [dg du] makes w â too.

Products are in BF16 with FP32 sums. The values that the backward computes again can differ from the engine's forward in
the last BF16 bit. W4A8 is not supported. A token's experts must all be different.

For the grouped products (`product`, `input_gradient`, `weight_gradient`) rows are sorted by expert (`route`), and each
expert multiplies its own rows, without padding: by Triton kernels on GPUs (`qarl.kernels.triton.experts`), else by
PyTorch. On GPUs the host never reads how many rows an expert has, so it does not wait for the device. Weights are
stacked wire tensors:

    w4a16        `weight_packed` int32 [E, N, K/8], `weight_scale` BF16 [E, N, K/g]
    w8a8, fp8    `weight` int8 or float8_e4m3fn [E, N, K], `weight_scale` FP32 [E, N, 1]
    bf16         `weight` BF16 [E, N, K]
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from qarl.kernels.base import ExpertsKernel, ExpertsShape, Tensors, dequantize, is_gpu
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.reference import grouped_linear, quantize_fp8, quantize_int8, silu_mul
from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import BF16_BF16, FP8_FP8, INT4_BF16, INT8_INT8, Operands, Scheme

LOW_BIT = (INT4_BF16, INT8_INT8, FP8_FP8)
"""The low-bit operands of experts."""


class LowBitExperts(NamedTuple):
    """One layer's experts: the stacked wire tensors for the backward, and `prepared`, a copy in the kernel's layout.

    Each attribute is read once per pass, so `qarl.quant.experts.ExpertsInOneCopy` computes it when it is read.
    """

    kernel: type[ExpertsKernel]
    gate_up: Tensors
    down: Tensors
    prepared: Any

    @classmethod
    def of(cls, kernel: type[ExpertsKernel], gate_up: Tensors, down: Tensors) -> LowBitExperts:
        """Prepare one layer's experts."""
        return cls(kernel, gate_up, down, kernel.prepare(gate_up, down))


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
        kernel = ctx.experts.kernel
        gate_up = ctx.experts.gate_up
        need_x, need_router, need_gate_up, need_down = ctx.needs_input_grad[:4]
        routing = route(topk_ids, sizes_of(gate_up)[0])
        state = _products(kernel, x, gate_up, routing)
        grad = grad_outputs[0][routing.token]
        grad_a = input_gradient(grad, ctx.experts.down, routing.ends)
        between = _with_triton if has_triton(x.device) else _with_pytorch
        made = between(
            kernel, state, grad, grad_a, topk_weights.flatten().float(), routing.order, need_down
        )
        grad_router = grad_down = grad_gate_up = grad_x = None
        if need_router:
            grad_router = made.router.view(topk_weights.shape).to(topk_weights.dtype)
        if need_down:
            grad_down = weight_gradient(made.grad, made.a, routing.ends)
        if need_x:
            rows = input_gradient(made.hidden, gate_up, routing.ends)
            grad_x = combine(rows, routing, topk_ids.shape[1])
        if need_gate_up:
            inputs = dequantized_rows(state.x, state.x_scale)
            grad_gate_up = weight_gradient(made.hidden, inputs, routing.ends)
        return grad_x, grad_router, grad_gate_up, grad_down, None, None


class _State(NamedTuple):
    """Values of the forward, with rows sorted by expert: input `x`, and `gate_up` [M, 2I].

    `x_scale` is None if x is not 8-bit.
    """

    x: torch.Tensor
    x_scale: torch.Tensor | None
    gate_up: torch.Tensor


def _products(kernel: Any, x: torch.Tensor, gate_up: Tensors, routing: Routing) -> _State:
    operands = operands_of(gate_up)
    scale: torch.Tensor | None = None
    if operands.rounds_activations:
        # Each token is quantized once for all its experts.
        x, scale = kernel.quantize(operands, x.contiguous())
    rows = _gathered(x, routing.token)
    row_scale = None if scale is None else scale[routing.token]
    return _State(rows, row_scale, product(rows, row_scale, gate_up, routing.ends))


def _activations(kernel: Any, state: _State) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the input of down_proj [M, I], and its scales [M, 1] if it is 8-bit."""
    a = silu_mul(*state.gate_up.chunk(2, dim=1))
    if state.x_scale is None:
        return a, None
    operands = INT8_INT8 if state.x.dtype == torch.int8 else FP8_FP8
    quantized: tuple[torch.Tensor, torch.Tensor] = kernel.quantize(operands, a)
    return quantized


def _gathered(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return x[token]. Some devices cannot index 8-bit floats, so they are indexed as bytes."""
    return x.view(torch.uint8)[token].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[token]


class _Between(NamedTuple):
    """What the backward computes between its products, with rows sorted by expert.

    `hidden` BF16 [M, 2I]: the gradient of gate and up. `router` FP32 [M]: that of the routing weights, in the order of
    `topk_ids`. grad^T a is the gradient of down_proj, with BF16 `grad` [M, H] and `a` [M, I].
    """

    hidden: torch.Tensor
    router: torch.Tensor
    grad: torch.Tensor
    a: torch.Tensor


def _with_triton(
    kernel: Any, state: _State, grad: torch.Tensor, grad_a: torch.Tensor, weights: torch.Tensor, order: torch.Tensor,
    need_down: bool,
) -> _Between:  # fmt: skip
    from qarl.kernels.triton.experts import swiglu_backward

    # Without scales, the kernel computes a again, which costs less than to write and read it.
    a, scale = (None, None) if state.x_scale is None else _activations(kernel, state)
    made = swiglu_backward(grad_a, state.gate_up, a, scale, weights, order, weighted=need_down)
    return _Between(
        made.hidden, made.router, grad, made.hidden if made.weighted is None else made.weighted
    )


def _with_pytorch(
    kernel: Any, state: _State, grad: torch.Tensor, grad_a: torch.Tensor, weights: torch.Tensor, order: torch.Tensor,
    need_down: bool,
) -> _Between:  # fmt: skip
    a = dequantized_rows(*_activations(kernel, state))
    weight = weights[order, None]
    by_row = (grad_a.float() * a.float()).sum(1)
    router = torch.empty_like(by_row).index_put_((order,), by_row)
    if need_down:
        grad = (grad.float() * weight).to(grad.dtype)
    return _Between(
        _silu_mul_backward(grad_a.float() * weight, *state.gate_up.chunk(2, dim=1)), router, grad, a
    )


def _silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gradients of gate and up, BF16 [M, 2I] with gate first, from `grad` FP32 [M, I]."""
    g = gate.float()
    u = up.float()
    sigmoid = g.sigmoid()
    slope = sigmoid * (1 + g * (1 - sigmoid))
    return torch.cat(((grad * u * slope).bfloat16(), (grad * g * sigmoid).bfloat16()), dim=1)


class _GroupedExperts(ExpertsKernel):
    """Experts computed by our grouped products. An expert's output is rounded to BF16, weighted, and rounded again."""

    @staticmethod
    def prepare(gate_up: Tensors, down: Tensors) -> tuple[Tensors, Tensors]:
        """Return the wire tensors themselves."""
        return gate_up, down

    @classmethod
    def forward(
        cls,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        prepared: tuple[Tensors, Tensors],
    ) -> torch.Tensor:
        gate_up, down = prepared
        routing = route(topk_ids, sizes_of(gate_up)[0])
        state = _products(cls, x, gate_up, routing)
        y = product(*_activations(cls, state), down, routing.ends)
        weight = topk_weights.flatten()[routing.order, None]
        return combine((y.float() * weight).to(y.dtype), routing, topk_ids.shape[1])


class TritonExperts(_GroupedExperts):
    """Experts computed by the Triton kernels of qarl.kernels.triton.experts."""

    name = "triton"
    operands = LOW_BIT

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return unavailable(scheme.operands, device)

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from qarl.kernels.triton.quantize import quantize_tokens

        return quantize_tokens(x, torch.int8 if operands == INT8_INT8 else torch.float8_e4m3fn)


class ReferenceExperts(_GroupedExperts):
    """Experts computed one after another, with PyTorch's own products."""

    name = "reference"
    operands = (*LOW_BIT, BF16_BF16)
    reference = True

    @staticmethod
    def unavailable(scheme: Scheme, device: torch.device, shape: ExpertsShape) -> str | None:
        return None

    @staticmethod
    def quantize(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (quantize_int8 if operands == INT8_INT8 else quantize_fp8)(x)


class Routing(NamedTuple):
    """Rows sorted by expert.

    `order`, int64 [T k]: each row's place in the flattened `topk_ids`. `token`, int64 [T k]: its token. `ends`, int32
    [E]: the end of each expert's rows, for PyTorch's `grouped_mm`.
    """

    order: torch.Tensor
    token: torch.Tensor
    ends: torch.Tensor


def route(topk_ids: torch.Tensor, experts: int) -> Routing:
    """Sort T * k rows by their expert. `topk_ids` [T, k]: k experts (0..experts-1) for each of T tokens.

    Rows of one expert stay in the order of the tokens."""
    chosen, order = topk_ids.flatten().long().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True)
    return Routing(order, order // topk_ids.shape[1], ends.to(torch.int32))


def combine(rows: torch.Tensor, routing: Routing, top_k: int) -> torch.Tensor:
    """Sum each token's experts in FP32, in the router's order: BF16 rows [T k, N] sorted by expert -> BF16 [T, N]."""
    if has_triton(rows.device):
        from qarl.kernels.triton.experts import combine as combine_in_one_pass

        place = torch.empty_like(routing.order)
        place[routing.order] = torch.arange(len(rows), device=rows.device)
        return combine_in_one_pass(rows, place, top_k)
    restored = torch.empty_like(rows)
    restored[routing.order] = rows
    return restored.view(-1, top_k, rows.shape[1]).float().sum(1).to(rows.dtype)


def has_triton(device: torch.device) -> bool:
    """Return whether Triton computes what is between the products. In PyTorch it is a chain of FP32 operations."""
    return unavailable(BF16_BF16, device) is None


def dequantized_rows(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return activations in BF16 [M, K]: `values` times their FP32 scales [M, 1], or `values` if `scale` is None."""
    if scale is None:
        return values
    if has_triton(values.device):
        from qarl.kernels.triton.quantize import dequantize_rows

        return dequantize_rows(values, scale)
    return dequantize(values, scale)


def operands_of(tensors: Tensors) -> Operands:
    """Return what multiplies these wire tensors of experts. int4 codes may be in tiles."""
    if "weight_packed" in tensors or "weight_tiles" in tensors:
        return INT4_BF16
    of_codes = {torch.int8: INT8_INT8, torch.bfloat16: BF16_BF16, torch.float8_e4m3fn: FP8_FP8}
    return of_codes[tensors["weight"].dtype]


def sizes_of(tensors: Tensors) -> tuple[int, int]:
    """Return E and N, the first two dimensions of the stacked wire tensors."""
    experts, rows = next(iter(tensors.values())).shape[:2]
    return experts, rows


def product(
    x: torch.Tensor, x_scale: torch.Tensor | None, tensors: Tensors, ends: torch.Tensor
) -> torch.Tensor:
    """Return x W_e^T, BF16 [M, N]. x [M, K] is BF16 or, with `x_scale` FP32 [M, 1], 8-bit."""
    operands = operands_of(tensors)
    if operands == BF16_BF16:
        return _bf16_product(x, tensors["weight"], ends)
    if unavailable(operands, x.device) is None:
        from qarl.kernels.triton import experts as triton

        if x_scale is None:
            return triton.grouped_w4a16_linear(
                x, tensors["weight_packed"], tensors["weight_scale"], ends
            )
        weight = tensors["weight"]
        scale = tensors["weight_scale"]
        return triton.grouped_scaled_mm(x, x_scale, weight, scale, ends, fast_accumulation=True)
    if x_scale is None:
        return grouped_linear(x, dequantized(tensors), ends)
    exact = tensors["weight"].double() * tensors["weight_scale"].double()
    return grouped_linear(x.double() * x_scale.double(), exact, ends).bfloat16()


def input_gradient(grad: torch.Tensor, tensors: Tensors, ends: torch.Tensor) -> torch.Tensor:
    """Return dX = grad @ W_e, BF16 [M, K], from BF16 grad [M, N]. W_e is the weight dequantized to BF16."""
    operands = operands_of(tensors)
    if operands == BF16_BF16:
        return _bf16_product(grad, tensors["weight"].mT, ends)
    if unavailable(operands, grad.device) is None:
        from qarl.kernels.triton import experts as triton

        scale = tensors["weight_scale"]
        if operands == INT4_BF16:
            return triton.grouped_w4a16_backward_input(grad, tensors["weight_packed"], scale, ends)
        return triton.grouped_scaled_backward_input(grad, tensors["weight"], scale, ends)
    return grouped_linear(grad, dequantized(tensors).mT, ends)


def _bf16_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [E, N, K] of any strides -> [M, N]."""
    return (
        F.grouped_mm(x, weight.mT, offs=ends)
        if is_gpu(x.device)
        else grouped_linear(x, weight, ends)
    )


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return grad_e^T @ x_e for each expert, BF16 [E, N, K], from BF16 grad [M, N] and x [M, K]: 0 without rows."""
    if not is_gpu(grad.device):
        starts = [0, *ends.tolist()]
        parts = [slice(start, end) for start, end in pairwise(starts)]
        return torch.stack([grad[part].t() @ x[part] for part in parts])
    made: torch.Tensor = F.grouped_mm(grad.t(), x, offs=ends)
    # PyTorch does not promise zeros for an expert without rows.
    if has_triton(made.device):
        from qarl.kernels.triton.experts import clear_unused

        return clear_unused(made, ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return made.masked_fill_((counts == 0)[:, None, None], 0.0)


def dequantized(tensors: Tensors) -> torch.Tensor:
    """Return the dequantized weight, BF16 [E, N, K]."""
    if "weight_packed" in tensors:
        packed = tensors["weight_packed"]
        scale = tensors["weight_scale"]
        return dequantize_int4(packed.flatten(0, 1), scale.flatten(0, 1)).view(
            *packed.shape[:2], -1
        )
    if "weight_scale" not in tensors:
        return tensors["weight"]
    return (tensors["weight"].float() * tensors["weight_scale"]).bfloat16()
