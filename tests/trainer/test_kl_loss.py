"""`actor.use_kl_loss` in the local backend: value and gradient against float64, and updates with a reference policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model

from qarl.metrics.mismatch import PhaseTimer
from qarl.objectives import library
from qarl.objectives.settings import Settings, objective_settings
from qarl.optim.loss_scale import LossScale
from qarl.rollout.engine import RolloutBatch
from qarl.trainer.batch import Batch, make_batch
from qarl.trainer.local import LocalTrainer
from qarl.trainer.old_log_probs import OldLogProbs
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy
from qarl.trainer.reference import Reference

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
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
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
        library.kl_term(policy[rows], reference[rows], mask[rows], settings, **counts)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    sum(parts).backward()
    wanted = weights_of_the_mean(mode, mask)
    d = torch.where(mask, (reference - policy.detach()).double(), 0.0)
    assert float(sum(parts)) == pytest.approx(float((wanted * (d.exp() - d - 1)).sum()), rel=1e-5)
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad.double(), -d * wanted, rtol=1e-5, atol=1e-8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def trainer_for(folder: Path, tmp_path: Path, *keys: str) -> LocalTrainer:
    """The part of a trainer that updates."""
    settings = config(
        tmp_path, f"model.path={folder}", "quant.scheme=w8a8", "quant.align=linears", "data.train_batch_size=2",
        "rollout.n=2", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2",
        "actor.log_prob_micro_batch_size_per_gpu=4", "optim.lr=1e-3", *keys,
    )  # fmt: skip
    trainer = object.__new__(LocalTrainer)
    trainer.config, trainer.objective, trainer.timer = settings, objective_settings(settings), PhaseTimer()
    trainer.policy, trainer.loss_scale = Policy.load(settings), LossScale(active=False)
    trainer.source = OldLogProbs(settings)
    trainer.optimizer = MasterOptimizer(
        trainer.policy.model.named_parameters(), settings.optim, total_training_steps=9, seed=0
    )
    if trainer.objective.use_kl_loss:
        trainer.reference = Reference(settings, trainer.objective)
    return trainer


def four_responses() -> Batch:
    tokens = [[7, 8, 9], [10, 11], [12], [13, 14]]
    rollout = RolloutBatch([[5, 6]] * 4, tokens, [[-4.0] * len(one) for one in tokens], ["stop"] * 4, weight_version=0)
    return make_batch(rollout, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), pad_token_id=0)


def updates(trainer: LocalTrainer, count: int) -> list[dict[str, float]]:
    found, batch = [], four_responses()
    for _ in range(count):
        old = trainer.old_log_probs(batch)
        if trainer.reference is not None:
            trainer.reference.begin(batch)
        found.append(trainer.update(batch, old))
    return found


@pytest.mark.verl
def test_the_kl_starts_at_zero_and_the_reference_never_moves(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_for(folder, tmp_path, "actor.use_kl_loss=true")
    reference = trainer.reference
    assert reference is not None and not any(p.requires_grad for p in reference.policy.model.parameters())
    before = [p.clone() for p in reference.policy.model.parameters()]
    metrics = updates(trainer, 3)
    assert metrics[0]["actor/kl_loss"] == 0 < metrics[1]["actor/kl_loss"] < metrics[2]["actor/kl_loss"]
    assert all(torch.equal(p, q) for p, q in zip(before, reference.policy.model.parameters(), strict=True))
    assert reference.policy.align == trainer.policy.align and reference.policy.scheme == trainer.policy.scheme


@pytest.mark.verl
def test_a_large_factor_holds_the_policy_near_the_reference(folder: Path, tmp_path: Path) -> None:
    free = updates(trainer_for(folder, tmp_path, "actor.use_kl_loss=true", "actor.kl_loss_coef=1e-9"), 6)
    held = updates(trainer_for(folder, tmp_path, "actor.use_kl_loss=true", "actor.kl_loss_coef=1e3"), 6)
    assert held[-1]["actor/kl_loss"] < free[-1]["actor/kl_loss"] / 4


def test_without_the_key_there_is_no_second_model(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_for(folder, tmp_path)
    assert trainer.reference is None and not trainer.objective.needs_verl
    assert "actor/kl_loss" not in updates(trainer, 1)[0]
