"""The examples of own parts, by numbers worked by hand. `tests/integration/e2e/test_own_parts.py` trains with them."""

from __future__ import annotations

import math

import pytest
import torch
from example_plugins import loaded

from qarl.config.objectives import get_objective
from qarl.config.objectives import unregister as unregister_objective
from qarl.config.optimizers import get_optimizer
from qarl.config.optimizers import unregister as unregister_optimizer
from qarl.objectives.loss import objective_loss
from qarl.objectives.settings import Settings


@pytest.fixture(autouse=True, scope="module")
def _plugins():
    with loaded(
        own_optimizer=lambda: unregister_optimizer("lion"),
        own_objective=lambda: unregister_objective("cispo"),
    ):
        yield


def test_two_steps_of_lion():
    """m0 = 0: the first step is -lr sign(g) after decay; m1 = 0.1 g. Then 0.9 m1 + 0.1 g decides."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    build = get_optimizer("lion").load()
    lion = build([("w", weight)], lr=0.1, betas=(0.9, 0.9), eps=0.0, weight_decay=0.5, seed=0)
    weight.grad = torch.tensor([3.0, -1.0])
    lion.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.95 - 0.1, -1.9 + 0.1]))
    weight.grad = torch.tensor([-1.0, -1.0])  # 0.9 * 0.3 - 0.1 > 0: the momentum outweighs it
    lion.step()
    second = torch.tensor([0.85 * 0.95 - 0.1, -1.8 * 0.95 + 0.1])
    torch.testing.assert_close(weight.detach(), second)


def _loss(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratios of 2 (clipped to 1.2), 0.5 (clipped to 0.8) and 1; advantages of 1 and -2; one token is padding."""
    new = torch.log(torch.tensor([[0.5, 0.1], [0.25, 0.9]])).requires_grad_()
    old = torch.log(torch.tensor([[0.25, 0.2], [0.25, 0.1]]))
    mask = torch.tensor([[1, 1], [1, 0]])
    settings = Settings(loss="cispo", clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss, _ = objective_loss(
        new[rows],
        old[rows],
        old[rows],
        torch.tensor([1.0, -2.0])[rows],
        mask[rows],
        settings,
        responses=2,
        tokens=3,
    )
    return loss, torch.autograd.grad(loss, new)[0]


def test_cispo_by_hand():
    loss, gradient = _loss(slice(None))
    expected = -(1.2 * math.log(0.5) + 0.8 * math.log(0.1) - 2.0 * math.log(0.25)) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)  # an FP32 sum of terms up to 2.8
    by_hand = torch.tensor([[-1.2, -0.8], [2.0, 0.0]]) / 3
    torch.testing.assert_close(gradient, by_hand)


def test_the_parts_of_a_mini_batch_add_up():
    parts = [_loss(slice(0, 1)), _loss(slice(1, 2))]
    whole = _loss(slice(None))
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole[0].item())
    torch.testing.assert_close(sum(gradient for _, gradient in parts), whole[1])


def test_what_the_config_knows_of_them():
    assert get_objective("cispo").clip == (0.2, 0.2)
    assert get_optimizer("lion").matrix_state_bytes == 4
