"""`qarl.trainer.advantages` against verl's own GRPO function, bit for bit, and its one departure."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from qarl.errors import UserError
from qarl.trainer.advantages import grpo_advantages


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
def test_group_of_one_keeps_its_reward_as_in_verl() -> None:
    rewards = torch.tensor([0.5, 1.0, 0.0])
    ours = grpo_advantages(rewards, [7, 8, 8])
    assert torch.equal(ours, verl_advantages(rewards, [7, 8, 8], True))
    assert ours[0] == pytest.approx(0.5)


def test_by_hand() -> None:
    # Rewards 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735; 0.5 / 0.57735 = 0.866025.
    advantages = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 3, 3]))
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * math.sqrt(0.75), atol=2e-6, rtol=0)


@pytest.mark.verl
@pytest.mark.parametrize("norm", [True, False])
def test_a_group_of_equal_rewards_is_exactly_zero_where_verl_returns_rounding_noise(norm: bool) -> None:
    rewards = torch.full((8,), 0.7)
    assert torch.equal(grpo_advantages(rewards, [0] * 8, norm_adv_by_std_in_grpo=norm), torch.zeros(8))
    noise = verl_advantages(rewards, [0] * 8, norm).abs().max()
    assert 0 < noise < 0.1


def test_bf16_rewards_are_upcast() -> None:
    rewards = torch.tensor([0.1, 0.2, 0.4], dtype=torch.bfloat16)
    advantages = grpo_advantages(rewards, [0, 0, 0])
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, grpo_advantages(rewards.float(), [0, 0, 0]))


def test_bad_rewards() -> None:
    with pytest.raises(UserError, match="reward of response 1 is nan"):
        grpo_advantages(torch.tensor([0.0, float("nan")]), [0, 0])
    with pytest.raises(ValueError, match="2 ids"):
        grpo_advantages(torch.zeros(3), [0, 0])


def test_import_is_light() -> None:
    heavy = {"verl", "ray", "transformers", "vllm"}
    code = f"import sys, qarl.trainer.advantages; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
