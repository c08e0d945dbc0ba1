"""AdamW: PyTorch's fused one for FP32 parameters, QaRL's own for BF16 ones, which it rounds stochastically."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qarl.optim.muon_adamw import MuonAdamW


def adamw(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
) -> torch.optim.Optimizer:
    """Return AdamW for the parameters, which must all be FP32 or all BF16. `seed`: for stochastic rounding."""
    named = list(named_parameters)
    if all(parameter.dtype == torch.float32 for _, parameter in named):
        parameters = [parameter for _, parameter in named]
        return torch.optim.AdamW(
            parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
    return MuonAdamW(named, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, seed=seed)
