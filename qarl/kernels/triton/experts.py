"""What an expert layer does between its products: SwiGLU's backward, the sum over a token's experts, unused experts.

Each is one pass over memory. In PyTorch, the FP32 temporaries of these chains would be several times as large as their
inputs and outputs. Rows are sorted by expert (`qarl.kernels.experts.grouped.Routing`). Arithmetic is in FP32, and
results are rounded once to BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qarl.kernels.device import launch
from qarl.kernels.triton._compat import (
    LAUNCH,
    e4m3_value,
    has_e4m3,
    require,
    require_device,
    round_bf16,
    to_bf16,
    to_fp32,
)

_PROGRAMS = 32  # that write zeros for an expert without rows


class SwigluGradients(NamedTuple):
    """`hidden` BF16 [M, 2I]: of gate and up. `router` FP32 [M]: of the routing weights, in the order of `topk_ids`.

    `weighted` BF16 [M, I] or None: the routing weight times the input of down_proj.
    """

    hidden: torch.Tensor
    router: torch.Tensor
    weighted: torch.Tensor | None


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, a_ptr, a_scale_ptr, weight_ptr, order_ptr, hidden_ptr, router_ptr, weighted_ptr, cols,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes one row.

    Bytes per element of grad: 10, + 1 for a quantized `a`, + 2 for `weighted`, at 4.3e12 B/s on H200.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order_ptr + row)
    weight = tl.load(weight_ptr + place)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < cols
        grad = to_fp32(tl.load(grad_ptr + row * cols + column, mask=inside, other=0.0))
        gate = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + column, mask=inside, other=0.0))
        up = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + cols + column, mask=inside, other=0.0))
        divisor = 1.0 + tl.exp(-gate)
        sigmoid = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        silu = gate * sigmoid
        if QUANTIZED:
            code = tl.load(a_ptr + row * cols + column, mask=inside, other=0)
            value = e4m3_value(code, HARDWARE) if FP8 else code.to(tl.float32)
            a = round_bf16(value * tl.load(a_scale_ptr + row))
        else:
            a = round_bf16(round_bf16(silu) * up)
        dot += grad * a
        if WEIGHTED:
            tl.store(weighted_ptr + row * cols + column, to_bf16(a * weight), mask=inside)
        grad = grad * weight
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(hidden_ptr + row * 2 * cols + column, to_bf16(grad * up * slope), mask=inside)
        tl.store(hidden_ptr + row * 2 * cols + cols + column, to_bf16(grad * silu), mask=inside)
    tl.store(router_ptr + place, tl.sum(dot, axis=0))


@triton.jit
def combine_kernel(rows_ptr, place_ptr, y_ptr, cols, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums one block of a token's rows. Bytes per element: 2 * TOP_K + 2, at 4.3e12 B/s on H200."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + choice)
        total += to_fp32(tl.load(rows_ptr + row * cols + column, mask=column < cols, other=0.0))
    tl.store(y_ptr + token * cols + column, to_bf16(total), mask=column < cols)


@triton.jit
def clear_unused_kernel(stack_ptr, ends_ptr, size, programs, BLOCK: tl.constexpr):
    """Write zeros for an expert without rows. `size`: numbers per expert."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends_ptr + expert) == begin:
        start = stack_ptr + expert.to(tl.int64) * size
        for block in range(tl.program_id(1) * BLOCK, size, programs * BLOCK):
            column = block + tl.arange(0, BLOCK)
            tl.store(start + column, tl.zeros([BLOCK], stack_ptr.dtype.element_ty), mask=column < size)


def swiglu_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    a: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    weights: torch.Tensor,
    order: torch.Tensor,
    *,
    weighted: bool,
) -> SwigluGradients:
    """Return the gradients from `grad` [M, I], the gradient of down_proj's input before the routing weight.

    `grad` and `gate_up` [M, 2I], gate first, are BF16. `a` int8 or e4m3 [M, I] with FP32 scales [M, 1] is down_proj's
    input. If it is None, it is silu(gate) * up. `weights` FP32 [M] in the order of `topk_ids`, and `order` int64 [M] as
    in `Routing`. Raise ValueError for any other shape or dtype.
    """
    rows, cols = grad.shape
    fits = gate_up.shape == (rows, 2 * cols) and weights.shape == order.shape == (rows,)
    require(fits, f"grad {list(grad.shape)} does not fit gate_up {list(gate_up.shape)} and {list(order.shape)} places")
    require(grad.dtype == gate_up.dtype == torch.bfloat16, "grad and gate_up must be bfloat16")
    require(weights.dtype == torch.float32 and order.dtype == torch.int64, "weights must be FP32 and order int64")
    quantized = a is not None
    fp8 = a is not None and a.dtype == torch.float8_e4m3fn
    if a is not None:
        require(a.dtype in (torch.int8, torch.float8_e4m3fn) and a.shape == grad.shape, "a must be 8-bit, [M, I]")
        require(a_scale is not None and a_scale.numel() == rows, f"scales of a must be FP32 [{rows}, 1]")
    require_device(grad, gate_up, weights, order)
    grad, gate_up, weights = grad.contiguous(), gate_up.contiguous(), weights.contiguous()
    hidden, router = torch.empty_like(gate_up), torch.empty_like(weights)
    product = torch.empty_like(grad) if weighted else None
    if grad.numel():
        codes = grad if a is None else a.contiguous()
        block = min(triton.next_power_of_2(cols), 1024)
        launch(
            swiglu_backward_kernel, (rows,),
            grad, gate_up, codes.view(torch.uint8) if fp8 else codes, a_scale if quantized else weights, weights, order,
            hidden, router, hidden if product is None else product, cols, QUANTIZED=quantized, FP8=fp8,
            HARDWARE=has_e4m3(grad.device), WEIGHTED=weighted, BLOCK=block, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return SwigluGradients(hidden, router, product)


def combine(rows: torch.Tensor, place: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum BF16 `rows` [T k, N] in FP32 -> BF16 [T, N]. Token t has the rows `place`[t k], ..., `place`[t k + k - 1].

    They are added in this order. `place` is int64 [T k]. Raise ValueError for any other shape or dtype.
    """
    count, cols = rows.shape
    require(rows.dtype == torch.bfloat16, f"rows must be bfloat16, not {rows.dtype}")
    fits = place.shape == (count,) and place.dtype == torch.int64 and count % top_k == 0
    require(fits, f"place must be int64 [{count}], and a multiple of {top_k} rows")
    require_device(rows, place)
    y = rows.new_empty(count // top_k, cols)
    if y.numel():
        block = min(triton.next_power_of_2(cols), 1024)
        launch(
            combine_kernel, (len(y), triton.cdiv(cols, block)), rows.contiguous(), place.contiguous(), y, cols,
            TOP_K=top_k, BLOCK=block, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return y


def clear_unused(stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Write zeros, in place, for experts of the contiguous `stack` [E, N, K] without rows; `ends` int32 [E] as in
    `Routing`. Other experts are neither read nor written. Return `stack`."""
    require(stack.is_contiguous() and ends.shape == (len(stack),), "needs a contiguous stack and one end per expert")
    require_device(stack, ends)
    if stack.numel():
        size = stack[0].numel()
        launch(
            clear_unused_kernel, (len(stack), _PROGRAMS), stack, ends, size, _PROGRAMS,
            BLOCK=1024, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return stack
