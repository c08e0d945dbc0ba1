"""`qarl.trainer.advantages` against verl's own GRPO function, bit for bit, its one departure, and all estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from objective_cases import run_config

from qarl.trainer.advantages import grpo_advantages, step_advantages


def verl_advantages(rewards: torch.Tensor, group_ids: list, norm: bool) -> torch.Tensor:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    # verl sums token rewards: the reward on the last of two tokens, as its reward managers place it.
    token_level_rewards = torch.stack([torch.zeros_like(rewards), rewards], dim=1)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards, torch.ones(len(rewards), 2), np.array(group_ids), norm_adv_by_std_in_grpo=norm
    )
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    return advantages[:, 0]


@pytest.mark.verl
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_equals_verl_bit_for_bit(n: int, norm: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    prompts = 12
    rewards = torch.rand(prompts * n, generator=generator)
    rewards[: prompts * n // 2] = (rewards[: prompts * n // 2] > 0.5).float()
    order = torch.randperm(prompts * n, generator=generator).tolist()
    group_ids = [f"prompt-{i // n}" for i in order]
    assert torch.equal(
        grpo_advantages(rewards, group_ids, norm_adv_by_std_in_grpo=norm), verl_advantages(rewards, group_ids, norm)
    )


@pytest.mark.verl
@pytest.mark.parametrize("norm", [True, False])
def test_a_group_of_equal_rewards_is_exactly_zero_where_verl_returns_rounding_noise(norm: bool) -> None:
    rewards = torch.full((8,), 0.7)
    assert torch.equal(grpo_advantages(rewards, [0] * 8, norm_adv_by_std_in_grpo=norm), torch.zeros(8))
    noise = verl_advantages(rewards, [0] * 8, norm).abs().max()
    assert 0 < noise < 0.1


def whitened(rewards: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262, equation 7) in float64: rewards whitened over the tokens of the batch."""
    per_token = rewards.double().repeat_interleave(torch.tensor(lengths))
    return (rewards.double() - per_token.mean()) / per_token.std()


@pytest.mark.verl
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("choice", ["grpo", "rloo", "dr_grpo", "reinforce"])
def test_each_estimator_is_its_formula_in_both_backends(choice: str, backend: str) -> None:
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    lengths = [3, 1, 4, 2, 5, 6, 2, 3, 1, 7, 2, 4]
    config = run_config(
        "reinforce" if choice == "reinforce" else "grpo",
        {},
        {"adv_estimator": "grpo" if choice == "reinforce" else choice},
        backend,
    )
    pairs = rewards.double().view(-1, 2)
    centred = pairs - pairs.mean(1, keepdim=True)
    expected = {
        "grpo": (centred / pairs.std(1, keepdim=True)).flatten(),
        "rloo": (pairs - pairs.flip(1)).flatten(),
        "dr_grpo": centred.flatten(),
        "reinforce": whitened(rewards, lengths),
    }[choice]
    advantages = step_advantages(config, rewards, lengths) if backend == "local" else on_verl(config, rewards, lengths)
    torch.testing.assert_close(advantages.double(), expected, rtol=2e-5, atol=1e-5)


def on_verl(config: Any, rewards: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """What verl's trainer computes with the keys that it is given."""
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from qarl.verl.config import algorithm_keys

    keys = algorithm_keys(config)
    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).float()
    scores = torch.zeros_like(mask)
    scores[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = rewards
    ids = np.array([str(i // 2) for i in range(len(lengths))], dtype=object)
    tensors = {"token_level_rewards": scores, "response_mask": mask, "old_log_probs": mask}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": ids})
    batch = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[f"{i // 2}_{i % 2}_0" for i in range(len(lengths))],
        adv_estimator=keys["algorithm.adv_estimator"],
        norm_adv_by_std_in_grpo=keys["algorithm.norm_adv_by_std_in_grpo"],
        num_repeat=2,
        config=AlgoConfig(adv_estimator=keys["algorithm.adv_estimator"], gamma=1.0),
    )
    return batch.batch["advantages"][:, 0]


@pytest.mark.verl
def test_an_empty_response_has_no_whitened_advantage() -> None:
    config = run_config("reinforce", {})
    advantages = step_advantages(config, torch.tensor([1.0, 0.0, 1.0, 0.5]), [2, 0, 1, 3])
    expected = whitened(torch.tensor([1.0, 0.0, 1.0, 0.5]), [2, 0, 1, 3])
    expected[1] = 0.0
    torch.testing.assert_close(advantages.double(), expected, rtol=2e-5, atol=1e-5)
