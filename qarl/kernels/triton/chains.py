"""Chains of elementwise operations between products, each in one pass: SwiGLU's gradient, rotary embedding and its
gradient, and the gradient of log-probs. `qarl.kernels.chains` has them in PyTorch, and says what is rounded where.

In PyTorch each operation of a chain reads and writes FP32 tensors: 30 bytes per element for a rotary embedding that
needs 4, and 50 for a logit whose gradient needs 4.

Every element is computed alone, so the bits depend on no tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch
from qarl.kernels.triton.numbers import LAUNCH, to_bf16, to_fp32

_BLOCK = 1024
_LOGITS = 4096
"""Logits of a program: 8 KiB of BF16."""
_PAIRS = 1024
"""Pairs of elements that a program turns, at least."""


@triton.jit
def silu_and_mul_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, size, BLOCK: tl.constexpr
):
    """Bytes per element of grad: 10, at 4.3e12 B/s on H200."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = to_fp32(tl.load(grad_ptr + at, mask=inside, other=0.0))
    gate = to_fp32(tl.load(gate_ptr + at, mask=inside, other=0.0))
    up = to_fp32(tl.load(up_ptr + at, mask=inside, other=0.0))
    divisor = 1.0 + tl.exp(-gate)
    sigmoid = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + at, to_bf16(grad * up * slope), mask=inside)
    tl.store(grad_up_ptr + at, to_bf16(grad * gate * sigmoid), mask=inside)


@triton.jit
def turn_kernel(
    x_ptr, cosine_ptr, sine_ptr, y_ptr, heads, turns, token_stride, head_stride,
    HALF: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """A program turns `HEADS` heads of one token. Token t has the row t % turns of cosines and sines, [turns, 2 HALF],
    whose halves are equal. `PAIRS`: HALF, rounded up to a power of two. `BACK`: turn back.

    Bytes per element: 4, and a cosine and a sine for each token, at 4.3e12 B/s on H200.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    exists = pair < HALF
    angle = (token % turns) * (2 * HALF) + pair
    cosine = to_fp32(tl.load(cosine_ptr + angle, mask=exists, other=0.0))[None, :]
    sine = to_fp32(tl.load(sine_ptr + angle, mask=exists, other=0.0))[None, :]
    if BACK:
        sine = -sine
    inside = (head < heads)[:, None] & exists[None, :]
    begin = x_ptr + token * token_stride + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    first = to_fp32(tl.load(begin, mask=inside, other=0.0))
    second = to_fp32(tl.load(begin + HALF, mask=inside, other=0.0))
    out = y_ptr + (token * heads + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(out, to_bf16(first * cosine - second * sine), mask=inside)
    tl.store(out + HALF, to_bf16(second * cosine + first * sine), mask=inside)


@triton.jit
def log_softmax_backward_kernel(
    logits_ptr, log_sum_ptr, token_ptr, grad_ptr, out_ptr, cols, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    """A program writes the gradient of a block of a row's logits. `inverse`: 1 / temperature.

    Bytes per logit: 4 in BF16, at 4.3e12 B/s on H200.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < cols
    at = row * cols + column
    scaled = to_fp32(tl.load(logits_ptr + at, mask=inside, other=0.0)) * inverse
    probability = tl.exp(scaled - tl.load(log_sum_ptr + row))
    chosen = tl.where(column == tl.load(token_ptr + row), 1.0, 0.0)
    value = (chosen - probability) * tl.load(grad_ptr + row) * inverse
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + at, to_bf16(value), mask=inside)
    else:
        tl.store(out_ptr + at, value, mask=inside)


def silu_and_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up, BF16 [..., N]. All operands are BF16 [..., N]."""
    grad, gate, up = (tensor.contiguous() for tensor in (grad, gate, up))
    grad_gate = torch.empty_like(gate)
    grad_up = torch.empty_like(up)
    size = grad.numel()
    launch(
        silu_and_mul_backward_kernel, (triton.cdiv(size, _BLOCK),),
        grad, gate, up, grad_gate, grad_up, size, BLOCK=_BLOCK, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return grad_gate, grad_up


def turn(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, back: bool
) -> torch.Tensor:
    """Return the rotary embedding of x BF16 [B, T, heads, D], contiguous. `cosines`, `sines`: BF16 [B or 1, T, D]."""
    batch, tokens, heads, size = x.shape
    rows = x.flatten(0, 1)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    y = x.new_empty(x.shape)
    half = size // 2
    pairs = triton.next_power_of_2(half)
    at_once = min(triton.next_power_of_2(heads), max(_PAIRS // pairs, 1))
    launch(
        turn_kernel, (batch * tokens, triton.cdiv(heads, at_once)),
        rows, cosines.contiguous(), sines.contiguous(), y, heads, cosines.numel() // size,
        rows.stride(0), rows.stride(1), HALF=half, PAIRS=pairs, HEADS=at_once, BACK=back, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return y


def log_softmax_backward(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    tokens: torch.Tensor,
    grad: torch.Tensor,
    *,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of `logits` [T, V], BF16 or FP32. Arguments are as in `qarl.kernels.chains`."""
    rows, cols = logits.shape
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    launch(
        log_softmax_backward_kernel, (rows, triton.cdiv(cols, _LOGITS)),
        logits, log_sums, tokens, grad.contiguous(), out, cols, 1.0 / temperature,
        BLOCK=_LOGITS, num_warps=8, **LAUNCH,
    )  # fmt: skip
    return out
