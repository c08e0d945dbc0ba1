"""Gradients of BF16 parameters in verl's actor: micro-batches are added up in FP32, and not in BF16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qarl.config.optimizers import get_optimizer
from qarl.verl.optimizer import build_optimizer

PARTS = (1.0, 2.0**-9, 2.0**-9, 2.0**-9)
"""In BF16 each of the later ones is lost beside the first."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_micro_batch_is_lost(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(3, 2, dtype=dtype)
    keys = {"eps": 1e-8, "seed": 0}
    config = SimpleNamespace(
        lr=0.0, betas=[0.9, 0.999], weight_decay=0.0, override_optimizer_config=keys
    )
    optimizer = build_optimizer(linear, config, get_optimizer("adamw"))
    for step in range(2):
        for part in PARTS:
            (linear.weight * part).sum().backward()
        gradient = linear.weight.grad
        assert gradient is not None and gradient.dtype == torch.float32, step
        assert set(gradient.flatten().tolist()) == {sum(PARTS)}
        optimizer.step()
        optimizer.zero_grad()
