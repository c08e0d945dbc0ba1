"""Several updates of `MuonAdamW`, against the muon package bit for bit and against torch's AdamW."""

from __future__ import annotations

import pytest
import torch
from muon import SingleDeviceMuonWithAuxAdam

from qarl.optim.muon_adamw import MuonAdamW

SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (24, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
}
SHAPES |= {"model.norm.weight": (8,), "model.embed_tokens.weight": (16, 8)}
UPDATES = 5
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def set_gradients(weights: dict[str, torch.nn.Parameter], update: int) -> None:
    generator = torch.Generator().manual_seed(1 + update)
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_muon_and_adamw_have_the_bits_of_the_muon_package() -> None:
    """Momentum, Nesterov's look-ahead, the scale of tall matrices, bias corrections and decay, over five updates."""
    ours, theirs = parameters(), parameters()
    optimizer = MuonAdamW(ours.items(), **ADAM, muon_lr=0.02, muon_momentum=0.9)
    matrices = [weight for name, weight in theirs.items() if "proj" in name]
    others = [weight for name, weight in theirs.items() if "proj" not in name]
    muon = {"params": matrices, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    expected = SingleDeviceMuonWithAuxAdam([muon, {"params": others, **ADAM, "use_muon": False}])
    for update in range(UPDATES):
        set_gradients(ours, update)
        set_gradients(theirs, update)
        optimizer.step()
        expected.step()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_adamw_is_torchs_adamw() -> None:
    """The order of FP32 operations differs: five updates of 0.01 may differ by some steps of 2^-24 each."""
    ours, theirs = parameters(), parameters()
    optimizer = MuonAdamW(ours.items(), **ADAM)
    expected = torch.optim.AdamW(theirs.values(), **ADAM)  # type: ignore[arg-type]  # a dict of several types
    for update in range(UPDATES):
        set_gradients(ours, update)
        set_gradients(theirs, update)
        optimizer.step()
        expected.step()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=2e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("other", [{"name": "b"}, {"seed": 1}], ids=str)
def test_another_name_or_seed_rounds_with_other_bits(other: dict[str, object]) -> None:
    """Weights halfway between two BF16 numbers: half of 4096 elements differ, give or take five times 32."""
    moved = []
    for change in ({}, other):
        keys = {"name": "a", "seed": 0} | change
        weight = torch.nn.Parameter(torch.full((4096,), 1.75, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        MuonAdamW(
            [(str(keys["name"]), weight)], lr=2.0**-8, eps=0.0, seed=int(str(keys["seed"]))
        ).step()
        moved.append(weight.detach() != 1.75)
    assert abs(int((moved[0] != moved[1]).sum()) - 2048) < 160
