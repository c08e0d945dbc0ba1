"""The schedule by hand and against transformers', the clipping against torch's, and the factor of an FP16 loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from qarl.config import OptimConfig
from qarl.trainer import master_optimizer
from qarl.trainer.master_optimizer import FIRST, MasterOptimizer, lr_scale, write_back


def settings(**keys: Any) -> OptimConfig:
    return OptimConfig(lr=0.1, lr_warmup_steps=4, **keys)


def test_the_warmup_is_linear_from_zero() -> None:
    expected = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert [
        lr_scale(step, settings(lr_scheduler_type="constant"), 12) for step in range(6)
    ] == expected


def test_the_cosine_ends_at_its_floor_and_stays_there() -> None:
    """From step 4 to step 12: 1 at the start, halfway between 1 and the floor of 0.2 in the middle, then the floor."""
    cosine = settings(lr_scheduler_type="cosine", min_lr_ratio=0.2)
    scales = [lr_scale(step, cosine, 12) for step in (4, 6, 8, 10, 12, 13, 100)]
    quarter = math.cos(math.pi / 4)
    expected = [1.0, 0.6 + 0.4 * quarter, 0.6, 0.6 - 0.4 * quarter, 0.2, 0.2, 0.2]
    assert scales == pytest.approx(expected)


def test_without_a_floor_the_cosine_is_that_of_transformers() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = get_cosine_schedule_with_warmup(torch.optim.SGD([weight], lr=1.0), 4, 12)
    cosine = settings(lr_scheduler_type="cosine", min_lr_ratio=0.0)
    for step in range(13):
        assert lr_scale(step, cosine, 12) == pytest.approx(theirs.lr_lambdas[0](step))


def test_the_matrices_of_muon_follow_the_schedule() -> None:
    """With one gradient in all steps and no momentum, the orthogonalized update is the same in all of them, and a
    matrix moves by the learning rate times this update."""
    name = "model.layers.0.mlp.up_proj.weight"
    muon = settings(name="muon", muon_lr=0.02, muon_momentum=0.0, weight_decay=0.0)
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    optimizer = MasterOptimizer([(name, weight)], muon, seed=0, total_training_steps=12)
    moves = []
    for _ in range(6):
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.accumulate()
        optimizer.clip_and_step(1e9)
        optimizer.scheduler_step()
        moves.append(float((weight.detach() - before).norm()))
    assert moves[4] > 0
    shares = [move / moves[4] for move in moves]
    assert shares == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4, 1, 1], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resume_to_another_length_takes_its_rate_from_the_new_schedule(name: str) -> None:
    """AdamW moves a weight by its learning rate, as long as the gradient is the same in every step. A vector is
    AdamW's, whatever `optim.name` is."""
    cosine = settings(lr_scheduler_type="cosine", name=name, weight_decay=0.0)

    def take(weight: torch.nn.Parameter, steps: int, optimizer: MasterOptimizer) -> None:
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.accumulate()
            optimizer.clip_and_step(1e9)
            optimizer.scheduler_step()

    weight = torch.nn.Parameter(torch.zeros(3))
    first = MasterOptimizer([("weight", weight)], cosine, seed=0, total_training_steps=12)
    take(weight, 8, first)
    longer = MasterOptimizer([("weight", weight)], cosine, seed=0, total_training_steps=100)
    longer.load_state_dict(first.state_dict())
    before = weight.detach().clone()
    take(weight, 1, longer)
    expected = cosine.lr * lr_scale(8, cosine, 100)
    assert expected > 1.5 * cosine.lr * lr_scale(8, cosine, 12)
    torch.testing.assert_close(
        before - weight.detach(), torch.full((3,), expected), rtol=1e-4, atol=0
    )


def optimizer(weight: torch.nn.Parameter, **more: Any) -> MasterOptimizer:
    return MasterOptimizer(
        [("weight", weight)], settings(), seed=0, total_training_steps=12, **more
    )


@pytest.mark.parametrize("largest", [0.5, 1.3, 1.9, 2.0, 2.1, 5.0])
def test_gradients_are_clipped_as_torch_does(largest: float) -> None:
    """The norm is 2. What is below the limit stays as it is."""
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ours = optimizer(weight)
    ours.accumulate()
    assert ours.clip_grad_norm(largest) == 2.0
    theirs = torch.nn.Parameter(torch.zeros(4))
    theirs.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.nn.utils.clip_grad_norm_([theirs], largest)
    torch.testing.assert_close(ours.gradients["weight"], theirs.grad, rtol=1e-6, atol=0)


def test_the_factor_of_an_fp16_loss_is_divided_out_before_the_norm() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    ours = optimizer(weight, scale_loss=True)
    for _ in range(2):
        weight.grad = torch.full((4,), 0.25 * FIRST, dtype=torch.float16)
        ours.accumulate()
    assert ours.clip_grad_norm(10.0) == 1.0
    assert ours.gradients["weight"].tolist() == [0.5] * 4


ZEROS = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -0.0])
MASTERS_OF_ZEROS = torch.tensor([-0.0, 0.0, 1.0, -1e-60, 0.0, -0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("where", ["nowhere", "first part", "last part"])
def test_write_back_rounds_to_nearest_and_keeps_the_sign_of_a_zero(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, where: str
) -> None:
    """Bits of the rounded master, but for a zero that stays one: that has the sign it had."""
    monkeypatch.setattr(master_optimizer, "_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(11, 13, generator=generator).to(dtype)
    master = parameter.float() + torch.randn(11, 13, generator=generator) / 512
    master[3, 4] = torch.nan
    master[5] = torch.inf
    start = {"nowhere": None, "first part": 2, "last part": 130}[where]
    if start is not None:
        parameter.view(-1)[start : start + 6] = ZEROS.to(dtype)
        master.view(-1)[start : start + 6] = MASTERS_OF_ZEROS
    expected = master.to(dtype)
    both_zero = (expected == 0) & (parameter == 0)
    expected[both_zero] = parameter[both_zero]
    assert int(both_zero.sum()) == (0 if start is None else 4)
    strided = parameter.t().contiguous().t()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for written in (parameter, strided):
        write_back(written, master)
        assert torch.equal(written.contiguous().view(bits), expected.view(bits))
