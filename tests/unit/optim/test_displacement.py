"""How far BF16 weights move in 200 updates at learning rate 1e-6, against FP32 weights with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qarl.optim import muon_adamw as optimizer_module
from qarl.optim.muon_adamw import MuonAdamW

STEPS, LR = 200, 1e-6
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj")
START = [
    0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for shape in ((192, 128), (4, 96, 128))
]
SETTINGS: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"muon_lr": LR * 128**0.5}}


def displacement(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Gradients with a steady part and noise of twice its size, as those of RL steps on different data."""
    parameters = {
        n: torch.nn.Parameter(tensor.bfloat16().to(dtype))
        for n, tensor in zip(NAMES, START, strict=True)
    }
    before = [p.detach().double().clone() for p in parameters.values()]
    optimizer = MuonAdamW(parameters.items(), lr=LR, seed=1, **SETTINGS[name])
    random = torch.Generator().manual_seed(4)
    steady = [torch.randn(p.shape, generator=random) for p in parameters.values()]
    for _ in range(STEPS):
        for parameter, part in zip(parameters.values(), steady, strict=True):
            parameter.grad_dtype = None
            parameter.grad = part + 2 * torch.randn(part.shape, generator=random)
        optimizer.step()
    moved = [p.detach().double() - old for p, old in zip(parameters.values(), before, strict=True)]
    return torch.cat([tensor.flatten() for tensor in moved])


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_only_stochastic_rounding_moves_as_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = displacement(name, torch.float32)
    assert 1e-5 < float(exact.square().mean().sqrt()) < STEPS * LR
    stochastic = displacement(name, torch.bfloat16)
    assert 0.9 < float(stochastic @ exact / (exact @ exact)) < 1.1
    monkeypatch.setattr(
        optimizer_module, "stochastic_round", lambda source, *_: source.to(torch.bfloat16)
    )
    nearest = displacement(name, torch.bfloat16)
    assert float(nearest @ exact / (exact @ exact)) < 0.5
