"""Grouped products of routed tokens: each expert multiplies its own rows, without padding.

Rows are sorted by expert (`route`). The products `product`, `input_gradient` and `weight_gradient` are computed by
Triton kernels on GPUs (`qarl.kernels.triton.experts`), else by PyTorch. On GPUs the host never reads how many rows an
expert has, so it does not wait for the device. Weights are stacked wire tensors:

    w4a16        `weight_packed` int32 [E, N, K/8], `weight_scale` BF16 [E, N, K/g]
    w8a8, fp8    `weight` int8 or float8_e4m3fn [E, N, K], `weight_scale` FP32 [E, N, 1]
    bf16         `weight` BF16 [E, N, K]
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qarl.kernels.base import Tensors, dequantize, is_gpu
from qarl.kernels.int4 import dequantize_int4
from qarl.kernels.reference import grouped_linear
from qarl.kernels.triton.linears import unavailable
from qarl.schemes.base import BF16_BF16, FP8_FP8, INT4_BF16, INT8_INT8, Operands

LOW_BIT = (INT4_BF16, INT8_INT8, FP8_FP8)
"""The low-bit operands of experts."""


class Routing(NamedTuple):
    """Rows sorted by expert.

    `order`, int64 [T k]: each row's index in the flattened `topk_ids`. `token`, int64 [T k]: its token. `ends`, int32
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

        row_of = torch.empty_like(routing.order)
        row_of[routing.order] = torch.arange(len(rows), device=rows.device)
        return combine_in_one_pass(rows, row_of, top_k)
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
        from qarl.kernels.triton.experts import clear_unused

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
