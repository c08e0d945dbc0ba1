"""RMSNorm whose rows have the same bits however many there are, alone and behind a residual addition, and its gradient.

vLLM's `rms_norm` has 1024 threads a row if it is called with fewer than 256 rows, and 256 otherwise
(csrc/libtorch_stable/layernorm_kernels.cu). If a row has more than 2048 elements, this changes the order of its sum of
squares. So in models of 7B or 8B, whose rows have 3584 or 4096, no level of alignment is exact with vLLM's operator.
Here the tile, and with it the order of the sum, follows from the width alone. Rollout engine
(`qarl.rollout.vllm_plugin.cuda_norms`) and trainer (`qarl.align.cuda`) run this kernel.

Rounding is that of vLLM's operator: the sum with the residual is rounded to BF16, and (x * r) * weight once, from the
rounded sum. `qarl.kernels.reference` has both in PyTorch. r = 1 / sqrt(mean + epsilon) is correctly rounded, where
vLLM's rsqrtf is approximate.

Triton arranges threads, and with them a sum, by what it knows of pointers and strides. So it knows the same of all
callers: strides are not specialized, pointers are always aligned to 16 bytes, and the width is a constant.

No GPU has run these kernels yet (docs/lookup/results/gpu.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qarl.kernels.base import launch, processors
from qarl.kernels.triton.norm_widths import VECTOR, unavailable
from qarl.kernels.triton.numbers import INTERPRETED, LAUNCH, to_bf16, to_fp32

_TILE = 1024
"""Elements of a program's rows, at least. A thread has 32."""
_PER_PROCESSOR = 4
"""Programs for each multiprocessor in the backward, where a program adds the gradients of the weight of its rows."""


class NormTile(NamedTuple):
    """What a program works on at once: `rows` rows, `block` columns each, by `warps` warps."""

    rows: int
    block: int
    warps: int


def norm_tile(width: int) -> NormTile:
    """Return the tile for rows of `width` elements. It depends on nothing else."""
    block = triton.next_power_of_2(width)
    rows = max(_TILE // block, 1)
    return NormTile(rows, block, min(max(block // _TILE, 1), 8))


@triton.jit
def _mean(x, COLS: tl.constexpr):
    """Return the mean of each row of x, FP32 [ROWS, BLOCK] -> [ROWS, 1]."""
    total = tl.sum(x, axis=1, keep_dims=True)
    return tl.div_rn(total, tl.full(total.shape, COLS, tl.float32))


@triton.jit
def _scale(x, epsilon, COLS: tl.constexpr):
    """Return 1 / sqrt(mean of x**2 + epsilon) of each row of x, FP32 [ROWS, BLOCK] -> [ROWS, 1]."""
    root = tl.sqrt_rn(_mean(x * x, COLS) + epsilon)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit(do_not_specialize=["rows", "heads", "token_vectors", "head_vectors"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rows, heads, token_vectors, head_vectors, epsilon,
    COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Normalise `ROWS` rows. With `RESIDUAL`, x + residual is rounded, stored, and normalised.

    Row token * heads + head of x begins at token * token_vectors + head * head_vectors, in units of `VECTOR` elements.
    So the compiler knows that rows are aligned, whatever the strides.

    y may be x, and the total may be the residual, because a program has read its rows before it writes them.

    Bytes per element: 4, or 8 with a residual, at 4.2e12 B/s on H200.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < COLS)[None, :]
    token = row // heads
    head = row - token * heads
    start = (token.to(tl.int64) * token_vectors + head.to(tl.int64) * head_vectors) * VECTOR
    x = to_fp32(tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0))
    out = row.to(tl.int64)[:, None] * COLS + column[None, :]
    if RESIDUAL:
        total = to_bf16(x + to_fp32(tl.load(residual_ptr + out, mask=inside, other=0.0)))
        tl.store(total_ptr + out, total, mask=inside)
        x = to_fp32(total)
    weight = to_fp32(tl.load(weight_ptr + column, mask=column < COLS, other=0.0))
    y = (x * _scale(x, epsilon, COLS)) * weight[None, :]
    tl.store(y_ptr + out, to_bf16(y), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, dw_ptr, rows, epsilon,
    COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Compute dX of every so many rows, and with `WEIGHT` the sum of their dW, one row of `dw_ptr` for each program.

    With n = x * r: dX = r * (g * w - n * mean(g * w * n)), and dW = sum of g * n.

    Bytes per element: 6, at 4.2e12 B/s on H200.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = to_fp32(tl.load(weight_ptr + column, mask=column < COLS, other=0.0))
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < COLS)[None, :]
        at = row.to(tl.int64)[:, None] * COLS + column[None, :]
        x = to_fp32(tl.load(x_ptr + at, mask=inside, other=0.0))
        grad = to_fp32(tl.load(grad_ptr + at, mask=inside, other=0.0))
        scale = _scale(x, epsilon, COLS)
        normal = x * scale
        of_normal = grad * weight[None, :]
        dx = scale * (of_normal - normal * _mean(of_normal * normal, COLS))
        tl.store(dx_ptr + at, to_bf16(dx), mask=inside)
        if WEIGHT:
            dw += grad * normal
    if WEIGHT:
        tl.store(
            dw_ptr + program.to(tl.int64) * COLS + column, tl.sum(dw, axis=0), mask=column < COLS
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the norm of x BF16 [..., K] with weight BF16 [K]: BF16 [..., K], contiguous.

    x [tokens, heads, K] may have any strides of tokens and heads, as q and k of vLLM's fused projection. Raises
    ValueError for other dtypes and for widths that the kernel does not have.
    """
    check(x, weight)
    x = _aligned(x)
    y = x.new_empty(x.shape)
    _launch(x, None, weight, y, None, epsilon)
    return y


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual, and the sum, both BF16 [..., K].

    `in_place`: they take the memory of x and residual, where these are contiguous.
    """
    check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"QaRL's RMSNorm adds a residual of the same shape and dtype to {list(x.shape)}, "
            f"not {residual.dtype} {list(residual.shape)}"
        )
    x, residual = (_aligned(tensor.contiguous()) for tensor in (x, residual))
    y, total = (x, residual) if in_place else (torch.empty_like(x), torch.empty_like(x))
    _launch(x, residual, weight, y, total, epsilon)
    return y, total


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    weight_too: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dX BF16 [..., K], and dW FP32 [K] or None.

    `grad`, `x`: BF16 [..., K], the gradient of the norm and its input. `weight_too`: whether dW is needed.
    """
    check(x, weight)
    grad, x = (_aligned(tensor.contiguous()) for tensor in (grad, x))
    width = x.shape[-1]
    rows = x.numel() // width
    rows_at_once, block, warps = norm_tile(width)
    most = 2 if INTERPRETED else _PER_PROCESSOR * processors(x.device)
    programs = max(min(triton.cdiv(rows, rows_at_once), most), 1)
    dx = torch.empty_like(x)
    dw = x.new_empty(programs if weight_too else 0, width, dtype=torch.float32)
    launch(
        rms_norm_backward_kernel, (programs,),
        grad, x, _aligned(weight), dx, dw, rows, epsilon, COLS=width, ROWS=rows_at_once, BLOCK=block, WEIGHT=weight_too,
        num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return dx, dw.sum(0) if weight_too else None


def check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError if x [..., K] and weight [K] are not BF16, or K has no kernel."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(f"QaRL's RMSNorm is built for BF16, not for {x.dtype} and {weight.dtype}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a weight {list(weight.shape)} does not fit rows of {x.shape[-1]}")
    if why_not := unavailable(x.shape[-1]):
        raise ValueError(f"QaRL's RMSNorm {why_not}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    epsilon: float,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    heads, token_stride, head_stride = _layout(x)
    rows_at_once, block, warps = norm_tile(width)
    if rows:
        launch(
            rms_norm_kernel, (triton.cdiv(rows, rows_at_once),),
            x, x if residual is None else residual, _aligned(weight), y, x if total is None else total,
            rows, heads, token_stride // VECTOR, head_stride // VECTOR, epsilon,
            COLS=width, ROWS=rows_at_once, BLOCK=block, VECTOR=VECTOR, RESIDUAL=residual is not None,
            num_warps=warps, **LAUNCH,
        )  # fmt: skip


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its rows do not begin at multiples of 16 bytes in memory, or are too scattered for the
    kernel: it has two strides."""
    strides = [
        stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1
    ]
    scattered = x.dim() > 3 and not x.is_contiguous()
    misplaced = any(stride % VECTOR for stride in strides) or x.data_ptr() % (2 * VECTOR)
    if x.stride(-1) != 1 or scattered or misplaced:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _layout(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the heads of each token of an aligned x [..., K], and the strides of tokens and heads."""
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    return 1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0
