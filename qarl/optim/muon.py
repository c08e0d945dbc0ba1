"""Muon's update of a matrix, as in the `muon-optimizer` package, in two functions that can run on different ranks.

    direction        Nesterov momentum. Elements are independent, so a rank computes it on its shard.
    orthogonalized   five Newton-Schulz steps by the package's `zeropower_via_newtonschulz5`. They need a whole matrix.

The package's `muon_update` is not used, because it overwrites the gradient and needs whole parameters on every rank.

A matrix has N rows (outputs) and K columns (inputs). Newton-Schulz brings the singular values near 1: the largest is
then between 1.05 and 1.2, and all but the smallest few are above 0.67. The package multiplies the result by sqrt(max(1,
N / K)). So an update with learning rate lr (`optim.muon_lr`) has

    spectral norm       lr * sqrt(max(1, N / K)) * (1.05 to 1.2)
    root mean square    lr / sqrt(K) * (0.8 to 0.95) over the elements, for every N

docs/paper_runs.md compares this lr with the paper's 1e-6.
"""

from __future__ import annotations

import torch
from muon import zeropower_via_newtonschulz5

_STEPS = 5


def use_muon(name: str, parameter: torch.Tensor) -> bool:
    """Return whether Muon updates this parameter. It updates matrices, except embeddings and lm_head.

    Stacked expert weights [experts, out, in] count as matrices, because Muon orthogonalizes the last two dimensions.
    """
    if "embed" in name or "lm_head" in name:
        return False
    return parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)


def direction(gradient: torch.Tensor, momentum: torch.Tensor, beta: float) -> torch.Tensor:
    """Add `gradient` to `momentum` in place, and return Nesterov's look-ahead. All are FP32 and have the same shape.

    `gradient` is not changed.
    """
    momentum.lerp_(gradient, 1 - beta)
    return gradient.lerp(momentum, beta)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Return Muon's update for directions [..., N, K], in BF16: U S V^T with S near 1, times sqrt(max(1, N / K))."""
    rows, columns = matrices.shape[-2:]
    if not matrices.numel():
        return matrices.to(torch.bfloat16)
    update: torch.Tensor = zeropower_via_newtonschulz5(matrices, steps=_STEPS)
    return update.mul_(max(1, rows / columns) ** 0.5)
