"""What an expert layer does beside its products, in Triton: routing, SwiGLU and its backward, sums, zeros.

    route             sorts rows by expert: one program an expert counts and places the rows of its own
    swiglu            silu(gate) * up
    swiglu_backward   its gradients, and those of the routing weights
    combine           a token's experts, summed, in the forward also weighted
    clear_unused      zeros for experts without rows

Each is one launch, and but for `route` one pass over memory. In PyTorch `route` is about ten launches, which a decode
step notices, and the FP32 temporaries of the other chains would be several times as large as their inputs and outputs.
Arithmetic is in FP32, and results are rounded once to BF16; silu(gate) is rounded before it is multiplied by up, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import LAUNCH, e4m3_value, has_e4m3, round_bf16, to_bf16, to_fp32

_PAIRS = 4096  # of a token and an expert, that a program reads at once
_PROGRAMS = 32  # that write zeros for an expert without rows


class SortedRows(NamedTuple):
    """T * k pairs of a token and an expert, sorted by expert. Pairs of one expert stay in the order of the tokens.

    `order`, int64 [T k]: each row's index in the flattened `topk_ids`. `token`, int64 [T k]: its token. `place`, int64
    [T k]: the inverse of `order`. `ends`, int32 [E]: the end of each expert's rows.
    """

    order: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor


class SwigluGradients(NamedTuple):
    """`hidden` BF16 [M, 2I]: of gate and up. `router` FP32 [M]: of the routing weights, in the order of `topk_ids`.

    `weighted` BF16 [M, I] or None: the routing weight times the input of down_proj.
    """

    hidden: torch.Tensor
    router: torch.Tensor
    weighted: torch.Tensor | None


@triton.jit
def route_kernel(
    ids_ptr, order_ptr, token_ptr, place_ptr, ends_ptr, pairs, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program places the rows of one expert behind those of all experts before it."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    row = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        inside = start + index < pairs
        chosen = tl.load(ids_ptr + start + index, mask=inside, other=0).to(tl.int32)
        row += (inside & (chosen < expert)).to(tl.int32)
    first = tl.sum(row, axis=0)
    for start in range(0, pairs, BLOCK):
        inside = start + index < pairs
        chosen = tl.load(ids_ptr + start + index, mask=inside, other=0).to(tl.int32)
        own = inside & (chosen == expert)
        count = own.to(tl.int32)
        place = (first + tl.cumsum(count, 0) - 1).to(tl.int64)
        pair = (start + index).to(tl.int64)
        tl.store(order_ptr + place, pair, mask=own)
        tl.store(token_ptr + place, pair // TOP_K, mask=own)
        tl.store(place_ptr + pair, place, mask=own)
        first += tl.sum(count, axis=0)
    tl.store(ends_ptr + expert, first)


@triton.jit
def silu_of(gate):
    """Return sigmoid and silu of FP32 `gate`."""
    divisor = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    return sigmoid, gate * sigmoid


@triton.jit
def swiglu_kernel(gate_up_ptr, a_ptr, cols, BLOCK: tl.constexpr):
    """A program computes one block of a row. Bytes per element of a: 6, at 4.3e12 B/s on H200."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < cols
    gate = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + column, mask=inside, other=0.0))
    up = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + cols + column, mask=inside, other=0.0))
    _, silu = silu_of(gate)
    tl.store(a_ptr + row * cols + column, to_bf16(round_bf16(silu) * up), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_up_ptr, a_ptr, a_scale_ptr, weight_ptr, order_ptr, hidden_ptr, router_ptr, weighted_ptr, cols,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr, HARDWARE: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program computes one row.

    Bytes per element of grad: 10, + 1 for a quantized `a`, + 2 for `weighted`, at 4.3e12 B/s on H200.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weight_ptr + slot)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < cols
        grad = to_fp32(tl.load(grad_ptr + row * cols + column, mask=inside, other=0.0))
        gate = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + column, mask=inside, other=0.0))
        up = to_fp32(tl.load(gate_up_ptr + row * 2 * cols + cols + column, mask=inside, other=0.0))
        sigmoid, silu = silu_of(gate)
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
    tl.store(router_ptr + slot, tl.sum(dot, axis=0))


@triton.jit
def combine_kernel(
    rows_ptr, slot_ptr, weight_ptr, y_ptr, cols, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program sums one block of a token's rows. Bytes per element: 2 * TOP_K + 2, at 4.3e12 B/s on H200."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        row = tl.load(slot_ptr + token * TOP_K + choice)
        value = to_fp32(tl.load(rows_ptr + row * cols + column, mask=column < cols, other=0.0))
        if WEIGHTED:
            value = value * tl.load(weight_ptr + token * TOP_K + choice)
        total += value
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
            tl.store(
                start + column, tl.zeros([BLOCK], stack_ptr.dtype.element_ty), mask=column < size
            )


def route(topk_ids: torch.Tensor, experts: int) -> SortedRows:
    """Sort T * k rows by their expert. `topk_ids` int32 or int64 [T, k]: k of the experts 0..experts-1 a token."""
    pairs = topk_ids.numel()
    order, token, place = (
        torch.empty(pairs, dtype=torch.int64, device=topk_ids.device) for _ in range(3)
    )
    ends = torch.empty(experts, dtype=torch.int32, device=topk_ids.device)
    launch(
        route_kernel, (experts,), topk_ids.contiguous(), order, token, place, ends, pairs,
        TOP_K=topk_ids.shape[1], BLOCK=min(triton.next_power_of_2(pairs), _PAIRS), num_warps=8, **LAUNCH,
    )  # fmt: skip
    return SortedRows(order, token, place, ends)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, BF16 [M, I], from BF16 [M, 2I], gate first."""
    rows, both = gate_up.shape
    a = gate_up.new_empty(rows, both // 2)
    block = min(triton.next_power_of_2(both // 2), 1024)
    launch(
        swiglu_kernel, (rows, triton.cdiv(both // 2, block)), gate_up.contiguous(), a, both // 2,
        BLOCK=block, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return a


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
    in `SortedRows`.
    """
    rows, cols = grad.shape
    fp8 = a is not None and a.dtype == torch.float8_e4m3fn
    grad = grad.contiguous()
    gate_up = gate_up.contiguous()
    weights = weights.contiguous()
    hidden = torch.empty_like(gate_up)
    router = torch.empty_like(weights)
    product = torch.empty_like(grad) if weighted else None
    codes = grad if a is None else a.contiguous()
    launch(
        swiglu_backward_kernel, (rows,),
        grad, gate_up, codes.view(torch.uint8) if fp8 else codes, weights if a is None else a_scale, weights, order,
        hidden, router, hidden if product is None else product, cols, QUANTIZED=a is not None, FP8=fp8,
        HARDWARE=has_e4m3(grad.device), WEIGHTED=weighted, BLOCK=min(triton.next_power_of_2(cols), 1024),
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    return SwigluGradients(hidden, router, product)


def combine(
    rows: torch.Tensor, place: torch.Tensor, top_k: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum BF16 `rows` [T k, N] in FP32 -> BF16 [T, N]. Token t has the rows `place`[t k], ..., `place`[t k + k - 1].

    They are added in this order, each times its weight if there are `weights`, FP32 [T, k]. `place` is int64 [T k].
    """
    y = rows.new_empty(len(rows) // top_k, rows.shape[1])
    cols = rows.shape[1]
    block = min(triton.next_power_of_2(cols), 1024)
    launch(
        combine_kernel, (len(y), triton.cdiv(cols, block)), rows.contiguous(), place.contiguous(),
        place if weights is None else weights.contiguous(), y, cols,
        TOP_K=top_k, WEIGHTED=weights is not None, BLOCK=block, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return y


def clear_unused(stack: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Write zeros, in place, for experts of the contiguous `stack` [E, N, K] without rows; `ends` int32 [E] as in
    `SortedRows`. Other experts are neither read nor written. Return `stack`."""
    launch(
        clear_unused_kernel, (len(stack), _PROGRAMS), stack, ends, stack[0].numel(), _PROGRAMS,
        BLOCK=1024, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return stack
