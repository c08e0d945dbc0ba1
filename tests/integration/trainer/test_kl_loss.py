"""`actor.use_kl_loss` in the local backend: value and gradient against float64, and updates with a reference policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import config
from updating_trainer import FOUR, four_responses, updating_trainer

from qarl.objectives import verl_functions
from qarl.objectives.settings import Settings
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")
LENGTHS = torch.tensor([5, 1, 0, 3])


def weights_of_the_mean(mode: str, mask: torch.Tensor) -> torch.Tensor:
    """The factor of each token's KL, from the definition of the average. float64 [B, T]."""
    lengths, responses = mask.sum(1, keepdim=True).clamp(min=1).double(), mask.any(1).sum().double()
    factor = {
        "token-mean": 1 / mask.sum().double() * torch.ones_like(lengths),
        "seq-mean-token-mean": 1 / (responses * lengths),
        "seq-mean-token-sum": torch.ones_like(lengths) / responses,
        "seq-mean-token-sum-norm": torch.ones_like(lengths) / (responses * 7),
    }[mode]
    return factor * mask


@pytest.mark.verl
@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_value_and_gradient_against_float64(mode: str) -> None:
    """Value: the mean of e^d - d - 1 with d = reference - policy. Gradient: (policy - reference) per token, K2's. The
    parts of a mini-batch add up, and padding counts for nothing, even NaN."""
    torch.manual_seed(0)
    mask = torch.arange(5)[None] < LENGTHS[:, None]
    policy = torch.randn(4, 5).masked_fill(~mask, torch.nan).requires_grad_()
    reference = torch.randn(4, 5).masked_fill(~mask, torch.nan)
    settings = Settings(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=1.0, loss_scale_factor=7)
    counts = {"responses": 3, "tokens": 9}
    parts = [
        verl_functions.kl_term(policy[rows], reference[rows], mask[rows], settings, **counts)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    sum(parts).backward()
    wanted = weights_of_the_mean(mode, mask)
    d = torch.where(mask, (reference - policy.detach()).double(), 0.0)
    assert float(sum(parts)) == pytest.approx(float((wanted * (d.exp() - d - 1)).sum()), rel=1e-5)
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad.double(), -d * wanted, rtol=1e-5, atol=1e-8)


def trainer_for(folder: Path, tmp_path: Path, *keys: str) -> Any:
    linears = ("quant.scheme=w8a8", "quant.align=linears", "actor.ppo_mini_batch_size=2")
    trainer = updating_trainer(
        config(tmp_path, *FOUR, *linears, f"model.path={folder}", "optim.lr=1e-3", *keys)
    )
    if trainer.objective.use_kl_loss:
        trainer.reference = Policy.load(trainer.config).freeze()
    return trainer


def updates(trainer: Any, count: int) -> list[dict[str, float]]:
    metrics, batch = [], four_responses()
    for _ in range(count):
        old = trainer.old_log_probs(batch)
        if trainer.reference is not None:
            batch.reference_log_probs = trainer.reference.batch_log_probs(batch, trainer.config)
        metrics.append(trainer.update(batch, old))
    return metrics


@pytest.mark.verl
def test_the_kl_starts_at_zero_and_the_reference_never_moves(
    pristine_model: Path, tmp_path: Path
) -> None:
    trainer = trainer_for(pristine_model, tmp_path, "actor.use_kl_loss=true")
    reference = trainer.reference
    assert reference is not None and not any(p.requires_grad for p in reference.model.parameters())
    before = [p.clone() for p in reference.model.parameters()]
    metrics = updates(trainer, 3)
    assert (
        metrics[0]["actor/kl_loss"] == 0 < metrics[1]["actor/kl_loss"] < metrics[2]["actor/kl_loss"]
    )
    assert all(torch.equal(p, q) for p, q in zip(before, reference.model.parameters(), strict=True))
    assert reference.align == trainer.policy.align and reference.scheme == trainer.policy.scheme
