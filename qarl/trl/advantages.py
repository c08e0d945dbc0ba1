"""Which responses have equal rewards in TRL. Equal rewards teach nothing, so their advantages are exactly 0.

TRL divides the rounding error of a group's mean by 1e-4, so without this a group of equal rewards moves the weights.
"""

from __future__ import annotations

import torch

from qarl.trainer.advantages import equal_rewards


def equal_responses(
    rewards: torch.Tensor, weights: torch.Tensor, group: int, aggregation: str
) -> torch.Tensor:
    """Return which responses have the rewards of all others of their group, bool [responses].

    Args:
        rewards: FP32 [responses, functions], NaN where a function did not score a response. Groups are consecutive.
        weights: FP32 [functions]. `group`: responses to a prompt.
        aggregation: TRL's `multi_objective_aggregation`. With `sum_then_normalize` the weighted sums are compared. With
            `normalize_then_sum` a group must have equal rewards of each function.
    """
    if aggregation == "sum_then_normalize":
        compared = (rewards * weights.to(rewards.device)).nansum(1, keepdim=True)
    else:
        compared = rewards.nan_to_num(nan=torch.finfo(torch.float32).min)
    prompts = [row // group for row in range(len(rewards))]
    everyone = torch.ones(len(rewards), dtype=torch.bool)
    columns = [
        equal_rewards(column, prompts, baseline="group", filled=everyone)
        for column in compared.cpu().T
    ]
    return torch.stack(columns).all(0).to(rewards.device)
