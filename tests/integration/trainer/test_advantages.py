"""`qarl.trainer.advantages` against verl's own GRPO function, bit for bit, its one departure, and all estimators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from objective_cases import run_config
from verl_advantages import advantages_in_verl

from qarl.objectives.verl_functions import outcome_advantages
from qarl.trainer.advantages import equal_rewards, grpo_advantages, step_advantages

CHOICES = ("grpo", "rloo", "dr_grpo", "reinforce")


def verl_advantages(rewards: torch.Tensor, group_ids: list, norm: bool) -> torch.Tensor:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    # verl sums token rewards: the reward on the last of two tokens, as its reward managers place it.
    token_level_rewards = torch.stack([torch.zeros_like(rewards), rewards], dim=1)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards,
        torch.ones(len(rewards), 2),
        np.array(group_ids),
        norm_adv_by_std_in_grpo=norm,
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
        grpo_advantages(rewards, group_ids, norm_adv_by_std_in_grpo=norm),
        verl_advantages(rewards, group_ids, norm),
    )


@pytest.mark.verl
@pytest.mark.parametrize("norm", [True, False])
def test_verl_returns_rounding_noise_for_equal_rewards(norm: bool) -> None:
    """The reason for QaRL's own rule: without this noise it could go."""
    noise = verl_advantages(torch.full((8,), 0.7), [0] * 8, norm).abs().max()
    assert 0 < noise < 0.1


@pytest.mark.verl
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("choice", CHOICES)
def test_equal_rewards_have_no_advantage(choice: str, backend: str) -> None:
    assert wrong_rows(choice, backend, sizes=(2, 3, 8)) == []


@pytest.mark.verl
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("choice", CHOICES)
def test_equal_rewards_have_no_advantage_in_groups_of_2_to_64(choice: str, backend: str) -> None:
    assert wrong_rows(choice, backend, sizes=range(2, 65)) == []


def wrong_rows(choice: str, backend: str, sizes: Iterable[int]) -> list[tuple[int, float]]:
    """Size and reward of the groups that have an advantage although their rewards are equal: 100 values a size.

    Among the groups of a batch is one with other rewards, whose advantages stay the estimator's. `reinforce` has no
    groups, so there all rewards of a batch are equal; each size has 20 of the values."""
    wrong = []
    for n in sizes:
        config = config_of(choice, backend, n=n)
        values = torch.tensor([i / 100 for i in range(1, 101)])
        if choice == "reinforce":
            batches = [
                (value.expand(n), [1 + i % 3 for i in range(n)]) for value in values[n % 5 :: 5]
            ]
        else:
            other = torch.arange(n) / n
            lengths = [1 + i % 3 for i in range(n)] * 101
            batches = [(torch.cat([values.repeat_interleave(n), other]), lengths)]
        for rewards, lengths in batches:
            advantages = advantages_of(config, rewards, lengths, backend).view(-1, n)
            if choice != "reinforce":
                *_, last = advantages
                assert last.unique().numel() == n
                advantages = advantages[:-1]
            noisy = (advantages != 0).any(1)
            wrong += [(n, float(row[0])) for row in rewards.view(-1, n)[: len(noisy)][noisy]]
    return wrong


def whitened(rewards: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262, equation 7) in float64: rewards whitened over the tokens of the batch."""
    per_token = rewards.double().repeat_interleave(torch.tensor(lengths))
    return (rewards.double() - per_token.mean()) / per_token.std()


@pytest.mark.verl
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("choice", CHOICES)
def test_each_estimator_is_its_formula_in_both_backends(choice: str, backend: str) -> None:
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    lengths = [3, 1, 4, 2, 5, 6, 2, 3, 1, 7, 2, 4]
    config = config_of(choice, backend, n=2)
    pairs = rewards.double().view(-1, 2)
    centred = pairs - pairs.mean(1, keepdim=True)
    expected = {
        "grpo": (centred / pairs.std(1, keepdim=True)).flatten(),
        "rloo": (pairs - pairs.flip(1)).flatten(),
        "dr_grpo": centred.flatten(),
        "reinforce": whitened(rewards, lengths),
    }[choice]
    advantages = advantages_of(config, rewards, lengths, backend)
    torch.testing.assert_close(advantages.double(), expected, rtol=2e-5, atol=1e-5)


def config_of(choice: str, backend: str, n: int) -> Any:
    loss = "reinforce" if choice == "reinforce" else "grpo"
    algorithm = {"adv_estimator": "grpo" if choice == "reinforce" else choice}
    config = run_config(loss, {}, algorithm, backend)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": n})})


def advantages_of(
    config: Any, rewards: torch.Tensor, lengths: list[int], backend: str
) -> torch.Tensor:
    """The advantages of a batch of groups, one after the other, by the local backend or by QaRL's trainer for verl."""
    if backend == "local":
        return step_advantages(config, rewards, lengths)
    n = config.rollout.n
    masks = [torch.ones(length, dtype=torch.int64) for length in lengths]
    rows = {
        f"{i // n}_{i % n}_0": {
            "uid": str(i // n),
            "response_mask": mask,
            "rm_scores": torch.cat([torch.zeros(len(mask) - 1), reward[None]]),
        }
        for i, (mask, reward) in enumerate(zip(masks, rewards, strict=True))
    }
    return torch.stack([row[0] for row in advantages_in_verl(config, rows)])


@pytest.mark.verl
def test_an_empty_response_has_no_whitened_advantage() -> None:
    config = run_config("reinforce", {})
    advantages = step_advantages(config, torch.tensor([1.0, 0.0, 1.0, 0.5]), [2, 0, 1, 3])
    expected = whitened(torch.tensor([1.0, 0.0, 1.0, 0.5]), [2, 0, 1, 3])
    expected[1] = 0.0
    torch.testing.assert_close(advantages.double(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.verl
@pytest.mark.parametrize("empty", [0.7, 0.2])
def test_an_empty_response_does_not_make_equal_rewards_differ(empty: float) -> None:
    config = run_config("reinforce", {})
    advantages = step_advantages(config, torch.tensor([0.7, empty, 0.7, 0.7]), [2, 0, 3, 3])
    assert advantages.tolist() == [0.0] * 4
    noise = outcome_advantages(
        "reinforce_plus_plus",
        torch.tensor([0.7, empty, 0.7, 0.7]),
        [0, 0, 1, 1],
        torch.tensor([2, 0, 3, 3]),
    )
    assert noise.any()  # the noise that would be trained on


BY_HAND = {
    # rewards 1, 0.8, 0; the mean is 0.6; the squares of the differences are 0.16, 0.04, 0.36, over 2: 0.28
    "grpo": [0.4 / 0.28**0.5, -0.6 / 0.28**0.5],
    "dr_grpo": [0.4, -0.6],
    "rloo": [1 - (0.8 + 0) / 2, 0 - (1 + 0.8) / 2],
    # tokens 1, 1, 0; the mean is 2/3; the squares are 1/9, 1/9, 4/9, over 2: 1/3
    "reinforce": [(1 / 3) * 3**0.5, (-2 / 3) * 3**0.5],
}
"""Advantages of the responses of 2 and 1 tokens beside an empty one, whose reward is 0.8."""


@pytest.mark.verl
@pytest.mark.parametrize("backend", ["local", "verl"])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_reward_of_an_empty_response_counts_in_its_group_as_in_verl(
    choice: str, backend: str
) -> None:
    rewards = [1.0, 0.8, 0.0]
    lengths = [2, 0, 1]
    config = config_of(choice, backend, n=3)
    if backend == "local":
        found = step_advantages(config, torch.tensor(rewards), lengths).tolist()
    else:
        rows = [(f"0_{i}_0", *pair) for i, pair in enumerate(zip(rewards, lengths, strict=True))]
        found = [row[0] for row in in_verl(rows, config=config)]
        assert found[1] == 0, "it has no token to train"
    assert [found[0], found[2]] == pytest.approx(BY_HAND[choice], rel=1e-5)


def in_verl(
    rows: list[tuple[str, float, int]],
    padding: tuple[str, ...] = (),
    config: Any = None,
    **keys: Any,
) -> list[list[float]]:
    """The advantages of rows with verl's key, a reward and a number of tokens; 0 tokens: one that is masked."""
    columns = {
        key: {
            "uid": key.split("_")[0],
            "response_mask": torch.full((max(length, 1),), min(length, 1)),
            "rm_scores": torch.cat([torch.zeros(max(length, 1) - 1), torch.tensor([reward])]),
        }
        for key, reward, length in rows
    }
    config = config or config_of("grpo", "verl", n=2)
    return [row.tolist() for row in advantages_in_verl(config, columns, padding, **keys)]


@pytest.mark.verl
def test_verls_padding_and_sessions_with_several_outputs() -> None:
    """Prompt 0 has equal rewards in the last outputs of its sessions, which alone count; prompt 1 has not."""
    rows = [("0_0_0", 0.1, 2), ("0_0_1", 0.7, 1), ("0_1_0", 0.7, 3), ("0_2_0", 0.7, 1)]
    rows += [("1_0_0", 0.7, 1), ("1_1_0", 0.7, 2), ("1_1_1", 0.2, 2)]
    rows += [("pad_0_0", 0.0, 0), ("pad_1_0", 0.0, 0)]
    *equal, first, second, third, _, _ = in_verl(rows, padding=("pad_0_0", "pad_1_0"))
    assert equal == [[0.0, 0.0], [0.0], [0.0, 0.0, 0.0], [0.0]]
    assert first[0] > 0 > second[0] == third[0]


@pytest.mark.verl
@pytest.mark.parametrize(("keys", "is_zero"), [({}, True), ({"gamma": 0.5}, False)])
def test_whitened_rewards_without_and_with_a_discount(keys: dict[str, Any], is_zero: bool) -> None:
    """Padding is not part of the batch; with a discount, tokens have other returns, and so advantages."""
    rows = [("0_0_0", 0.7, 1), ("0_1_0", 0.7, 3), ("1_0_0", 0.7, 2), ("pad_0_0", 0.0, 0)]
    advantages = in_verl(rows, padding=("pad_0_0",), adv_estimator="reinforce_plus_plus", **keys)
    assert (advantages[:3] == [[0.0], [0.0] * 3, [0.0] * 2]) is is_zero


@pytest.mark.verl
def test_rewards_with_a_kl_term_differ() -> None:
    """Both scores are 0.7. A KL of 0.5 nats, times `KL_FACTOR`, leaves the second response 0.65."""
    rows = {
        f"0_{i}_0": {
            "uid": "0",
            "response_mask": torch.ones(1, dtype=torch.int64),
            "rm_scores": torch.tensor([0.7]),
            "old_log_probs": torch.tensor([-1.0]),
            "ref_log_prob": torch.tensor([-1.0 - kl]),
        }
        for i, kl in enumerate((0.0, 0.5))
    }
    keys = {"use_kl_in_reward": True, "kl_penalty": "kl"}
    first, second = advantages_in_verl(config_of("grpo", "verl", n=2), rows, **keys)
    assert [float(first), float(second)] == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-3)


@pytest.mark.verl
def test_the_last_of_eleven_outputs_is_the_tenth_and_not_the_ninth() -> None:
    """Numbers of outputs are not compared as text. Only outputs 9 have equal rewards."""
    sessions = [("0_0", 0.7, 0.2), ("0_1", 0.7, 0.4), ("0_2", 0.7, 0.6)]
    rows = [(f"{name}_{i}", ninth, 1) for name, ninth, _ in sessions for i in range(10)]
    rows += [(f"{name}_10", last, 1) for name, _, last in sessions]
    *_, first, second, third = in_verl(rows)
    assert [first[0], second[0], third[0]] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("baseline", ["group", "batch", None])
def test_one_response_has_no_baseline(baseline: str | None) -> None:
    rewards = torch.tensor([0.5])
    assert not equal_rewards(rewards, [0], baseline=baseline, filled=torch.tensor([True])).any()
