"""The optimizer with FP32 copies, against torch's AdamW on FP32 parameters."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("trl")

from qarl.trl.optimizer import MasterAdamW

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"a.weight": (5, 7), "norm.weight": (7,)}
    return {
        name: torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16())
        for name, size in sizes.items()
    }


def gradients(step: int, parts: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(p.shape, generator=generator) for name, p in parameters().items()}
        for _ in range(parts)
    ]


def run(
    optimizer: torch.optim.Optimizer, named: dict[str, torch.nn.Parameter], steps: range
) -> None:
    for step in steps:
        for part in gradients(step):
            sum((p * part[name].to(p.dtype)).sum() for name, p in named.items()).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in named.values())
        optimizer.step()
        optimizer.zero_grad()


def masters(named: dict[str, torch.nn.Parameter]) -> MasterAdamW:
    return MasterAdamW(named.items(), decayed=["a.weight"], weight_decay=0.1, **SETTINGS)


def test_the_copies_are_torchs_fp32_weights() -> None:
    named = parameters()
    optimizer = masters(named)
    run(optimizer, named, range(20))
    whole = {name: torch.nn.Parameter(p.detach().float()) for name, p in parameters().items()}
    torchs = torch.optim.AdamW(
        [
            {"params": [whole["a.weight"]], "weight_decay": 0.1},
            {"params": [whole["norm.weight"]], "weight_decay": 0.0},
        ],
        **SETTINGS,
    )
    for step in range(20):
        for name, p in whole.items():
            p.grad = sum(part[name].bfloat16().float() for part in gradients(step))
        torchs.step()
    for name, p in named.items():
        copied = optimizer.state[p]["master"]
        torch.testing.assert_close(copied, whole[name].detach(), rtol=0, atol=2e-6)
        assert torch.equal(p, copied.bfloat16())


def test_weight_decay_shrinks_the_weight_and_not_its_update() -> None:
    """Adam's first update is the learning rate, 0.1: 1 becomes 0.9 by decay, then 0.8."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    settings = SETTINGS | {"lr": 0.1, "weight_decay": 1.0}
    optimizer = MasterAdamW([("a.weight", weight)], decayed=["a.weight"], **settings)
    weight.grad = torch.full((3,), 0.5)
    optimizer.step()
    assert optimizer.state[weight]["master"].tolist() == pytest.approx([0.8] * 3, abs=1e-6)


def test_a_saved_state_continues_bit_for_bit() -> None:
    named = parameters()
    optimizer = masters(named)
    run(optimizer, named, range(3))
    saved, weights = (
        copy.deepcopy(optimizer.state_dict()),
        {name: p.detach().clone() for name, p in named.items()},
    )
    run(optimizer, named, range(3, 6))
    again = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    resumed = masters(again)
    resumed.load_state_dict(saved)
    run(resumed, again, range(3, 6))
    assert all(torch.equal(p, again[name]) for name, p in named.items())
    pairs = zip(optimizer.state.values(), resumed.state.values(), strict=True)
    assert all(torch.equal(ours["master"], other["master"]) for ours, other in pairs)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    named = parameters()
    optimizer = masters(named)
    run(optimizer, named, range(2))
    before = (
        copy.deepcopy(optimizer.state_dict()),
        {name: p.detach().clone() for name, p in named.items()},
    )
    for name, p in named.items():
        p.grad = torch.full(p.shape, float("nan") if name == "norm.weight" else 1.0)
    optimizer.step()
    assert all(torch.equal(p, before[1][name]) for name, p in named.items())
    pairs = zip(before[0]["state"].values(), optimizer.state_dict()["state"].values(), strict=True)
    assert all(
        torch.equal(old["exp_avg"], new["exp_avg"]) and old["step"] == new["step"]
        for old, new in pairs
    )
