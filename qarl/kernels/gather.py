"""Rows of a matrix, some of them several times, whose gradients are summed in FP32 and rounded once.

PyTorch's indexing sums the gradients of a BF16 row in BF16: the last token of a prompt that eight responses share would
get eight roundings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rows_of(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `matrix[rows]`, [N, K], of a matrix [T, K]. `rows`: int64 [N]."""
    chosen: torch.Tensor = _Rows.apply(matrix, rows)
    return chosen


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = matrix.shape
        return matrix.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        (grad,) = grad_outputs
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype), None
