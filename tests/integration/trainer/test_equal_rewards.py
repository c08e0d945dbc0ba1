"""Updates of the local backend with equal rewards: no weight changes, whatever the objective and the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import config
from random_models import save_random_model
from updating_trainer import updating_trainer

from qarl.config.objectives import objective_names
from qarl.rollout.requests import RolloutBatch
from qarl.trainer.advantages import step_advantages
from qarl.trainer.batch import make_batch

pytestmark = pytest.mark.usefixtures("in_the_checkout")
SIZES = (
    "data.train_batch_size=2", "rollout.n=8", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.log_prob_micro_batch_size_per_gpu=16", "optim.lr=1e-2", "optim.weight_decay=0", "quant.scheme=w8a8",
    "quant.align=linears",
)  # fmt: skip
CHOICES = {
    **{loss: [f"actor.loss={loss}"] for loss in objective_names() if loss != "tbpo"},
    "tbpo": [],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "dr_grpo": ["actor.loss=grpo", "algorithm.adv_estimator=dr_grpo"],
    "muon": ["optim.name=muon", "optim.muon_lr=1e-2"],
    "rounded stochastically": ["optim.master_dtype=bf16"],
}


@pytest.mark.verl
@pytest.mark.parametrize("name", CHOICES)
def test_equal_rewards_leave_every_weight_as_it_was(name: str, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model")
    trainer = updating_trainer(config(tmp_path, *SIZES, *CHOICES[name], f"model.path={folder}"))
    lengths = [1 + i % 3 for i in range(16)]
    tokens = [list(range(7, 7 + length)) for length in lengths]
    log_probs = [[-4.0] * length for length in lengths]
    rollout = RolloutBatch([[5, 6]] * 16, tokens, log_probs, ["stop"] * 16, weight_version=0)
    rewards = torch.full((16,), 0.7)
    batch = make_batch(
        rollout, rewards, step_advantages(trainer.config, rewards, lengths), pad_token_id=0
    )
    before = {key: value.clone() for key, value in trainer.policy.model.state_dict().items()}
    for _ in range(2):
        metrics = trainer.update(batch, trainer.old_log_probs(batch))
        assert metrics["actor/grad_norm"] == 0.0
        assert metrics["actor/zero_advantage_frac"] == 1.0
    after = trainer.policy.model.state_dict()
    assert [key for key, value in after.items() if not torch.equal(value, before[key])] == []
