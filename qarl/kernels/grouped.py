"""Grouped products of routed tokens: each expert multiplies its own rows, without padding.

Rows are sorted by expert (`route`). The products `product`, `input_gradient` and `weight_gradient` are computed by
Triton kernels on GPUs (`qarl.kernels.triton.experts`), else by PyTorch. On GPUs the host never reads how many rows an
expert has, so it does not wait for the device. Weights are stacked wire tensors (`Stack`):

    w4a16        `weight_packed` int32 [E, N, K/8], `weight_scale` BF16 [E, N, K/g]
    w8a8, fp8    `weight` int8 or float8_e4m3fn [E, N, K], `weight_scale` FP32 [E, N, 1]
    bf16         `weight` BF16 [E, N, K]
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import Tensors, dequantize, is_gpu
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.reference import grouped_linear, silu_mul
from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import BF16_BF16, INT4_BF16, Operands


class Routing(NamedTuple):
    """Rows sorted by expert.

    `order`, int64 [T k]: each row's index in the flattened `topk_ids`. `token`, int64 [T k]: its token. `ends`, int32
    [E]: the end of each expert's rows, for PyTorch's `grouped_mm`. `place`, int64 [T k]: the inverse of `order`, or
    None without Triton.
    """

    order: torch.Tensor
    token: torch.Tensor
    ends: torch.Tensor
    place: torch.Tensor | None = None


def route(topk_ids: torch.Tensor, experts: int) -> Routing:
    """Sort T * k rows by their expert. `topk_ids` [T, k]: k experts (0..experts-1) for each of T tokens.

    Rows of one expert stay in the order of the tokens."""
    if has_triton(topk_ids.device):
        from qarl.kernels.triton import between_products

        order, token, place, ends = between_products.route(topk_ids, experts)
        return Routing(order, token, ends, place)
    chosen, order = topk_ids.flatten().long().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device), right=True)
    return Routing(order, order // topk_ids.shape[1], ends.to(torch.int32))


def combine(
    rows: torch.Tensor, routing: Routing, top_k: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's experts in FP32, in the router's order: BF16 rows [T k, N] sorted by expert -> BF16 [T, N].

    `weights` FP32 [T, k]: what to multiply the experts by in FP32, or None."""
    if routing.place is not None:
        from qarl.kernels.triton import between_products

        return between_products.combine(rows, routing.place, top_k, weights)
    restored = torch.empty_like(rows)
    restored[routing.order] = rows
    each = restored.view(-1, top_k, rows.shape[1]).float()
    return (each if weights is None else each.mul_(weights[..., None])).sum(1).to(rows.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, BF16 [M, I], from BF16 [M, 2I], gate first. silu(gate) is rounded to BF16, too."""
    if has_triton(gate_up.device):
        from qarl.kernels.triton import between_products

        return between_products.swiglu(gate_up)
    return silu_mul(*gate_up.chunk(2, dim=1))


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


def sizes_of(tensors: Tensors) -> tuple[int, int]:
    """Return E and N, the first two dimensions of the stacked wire tensors."""
    experts, rows = next(iter(tensors.values())).shape[:2]
    return experts, rows


class Stack:
    """A layer's stack of weights for one pass, and its BF16 copy, which is made at most once, if a product needs it."""

    def __init__(self, tensors: Tensors, operands: Operands) -> None:
        """`tensors`: wire tensors. int4 codes may not be in a kernel's layout. `operands`: what multiplies them."""
        self.tensors = tensors
        self.operands = operands
        self._copy: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return sizes_of(self.tensors)[0]

    def dequantized(self) -> torch.Tensor:
        """Return the weight in BF16 [E, N, K]."""
        if self._copy is None:
            of_device: Callable[[Tensors], torch.Tensor] = dequantized
            if unavailable(self.operands, next(iter(self.tensors.values())).device) is None:
                from qarl.kernels.triton.experts import dequantized_stack as of_device
            self._copy = of_device(self.tensors)
        return self._copy

    def drop_copy(self) -> None:
        """Free the BF16 copy, if there is one."""
        self._copy = None


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    stack: Stack,
    ends: torch.Tensor,
    *,
    token: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return x W_e^T, BF16 [M, N]. x [M, K] is BF16 or, with `x_scale` FP32 [M, 1], 8-bit.

    With `token`, int64 [M], x is [T, K], and row i multiplies x[token[i]]. `batch_invariant`: the bits of a row do not
    depend on the other rows. This matters only to W4A16 in Triton."""
    tensors = stack.tensors
    fused = unavailable(stack.operands, x.device) is None
    if stack.operands == INT4_BF16 and fused:
        from qarl.kernels.triton.experts import grouped_w4a16_linear

        return grouped_w4a16_linear(
            x,
            tensors["weight_packed"],
            tensors["weight_scale"],
            ends,
            token=token,
            batch_invariant=batch_invariant,
            dequantized=stack.dequantized,
        )
    if token is not None:
        x, x_scale = gathered(x, token), x_scale if x_scale is None else x_scale[token]
    if stack.operands == BF16_BF16:
        return _bf16_product(x, tensors["weight"], ends)
    if x_scale is None:
        return grouped_linear(x, stack.dequantized(), ends)
    if fused:
        from qarl.kernels.triton.experts import grouped_scaled_mm

        scale = tensors["weight_scale"]
        return grouped_scaled_mm(x, x_scale, tensors["weight"], scale, ends, fast_accumulation=True)
    exact = tensors["weight"].double() * tensors["weight_scale"].double()
    return grouped_linear(x.double() * x_scale.double(), exact, ends).bfloat16()


def gathered(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return x[token]. Some devices cannot index 8-bit floats, so they are indexed as bytes."""
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)[token].view(x.dtype)
    return x[token]


def input_gradient(grad: torch.Tensor, stack: Stack, ends: torch.Tensor) -> torch.Tensor:
    """Return dX = grad @ W_e, BF16 [M, K], from BF16 grad [M, N]. W_e is the weight dequantized to BF16."""
    tensors = stack.tensors
    if stack.operands == INT4_BF16 and unavailable(stack.operands, grad.device) is None:
        from qarl.kernels.triton.experts import grouped_w4a16_backward_input

        packed, scale = tensors["weight_packed"], tensors["weight_scale"]
        copy = stack.dequantized
        return grouped_w4a16_backward_input(grad, packed, scale, ends, dequantized=copy)
    return _bf16_product(grad.contiguous(), stack.dequantized().mT, ends)


def _bf16_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [E, N, K] of any strides -> [M, N]."""
    if is_gpu(x.device):
        return F.grouped_mm(x, weight.mT, offs=ends)
    return grouped_linear(x, weight, ends)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return grad_e^T @ x_e for each expert, BF16 [E, N, K], from BF16 grad [M, N] and x [M, K]: 0 without rows."""
    if not is_gpu(grad.device):
        starts = [0, *ends.tolist()]
        parts = [slice(start, end) for start, end in pairwise(starts)]
        return torch.stack([grad[part].t() @ x[part] for part in parts])
    gradient: torch.Tensor = F.grouped_mm(grad.t(), x, offs=ends)
    # PyTorch does not promise zeros for an expert without rows.
    if has_triton(gradient.device):
        from qarl.kernels.triton.between_products import clear_unused

        return clear_unused(gradient, ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return gradient.masked_fill_((counts == 0)[:, None, None], 0.0)


def dequantized(tensors: Tensors) -> torch.Tensor:
    """Return the dequantized weight, BF16 [E, N, K]."""
    if "weight_packed" in tensors:
        packed = tensors["weight_packed"]
        scale = tensors["weight_scale"]
        rows = dequantize_int4(packed.flatten(0, 1), scale.flatten(0, 1))
        return rows.view(*packed.shape[:2], -1)
    if "weight_scale" not in tensors:
        return tensors["weight"]
    return (tensors["weight"].float() * tensors["weight_scale"]).bfloat16()
