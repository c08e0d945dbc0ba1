"""Advantages for the local backend: GRPO's (arXiv 2402.03300), and verl's functions for the other estimators.

`grpo_advantages` equals verl's `compute_grpo_outcome_advantage` bit for bit, with one exception. A test checks this.
verl's function is not used, because its import takes seconds and loads ray. The exception is a group with equal
rewards. Its advantages are exactly 0 here. verl divides the rounding error of the mean by epsilon. For example, for
eight rewards of 0.7 verl returns 0.056 for every response, so this noise reinforces the whole group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from qarl.config import Config
from qarl.objectives import verl_functions

EPSILON = 1e-6
"""verl's addend to the standard deviation, in units of reward."""


def step_advantages(config: Config, rewards: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the advantage of each response of a step, FP32 [batch]. `rewards`: [batch], `lengths`: in tokens.

    The responses to a prompt must be consecutive. `algorithm.adv_estimator` chooses the function:
        grpo      GRPO's advantages
        dr_grpo   GRPO's without the division by the standard deviation (arXiv 2503.20783)
        rloo      verl's function
    With actor.loss=reinforce, verl's function whitens rewards over the tokens of the batch instead.
    """
    algorithm, group_ids = config.algorithm, [i // config.rollout.n for i in range(len(lengths))]
    norm = algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator == "grpo"
    if config.actor.loss == "reinforce":
        return verl_functions.outcome_advantages("reinforce_plus_plus", rewards, group_ids, torch.tensor(lengths))
    if algorithm.adv_estimator == "rloo":
        return verl_functions.outcome_advantages("rloo", rewards, group_ids, torch.tensor(lengths))
    return grpo_advantages(rewards, group_ids, norm_adv_by_std_in_grpo=norm)


def grpo_advantages(
    rewards: torch.Tensor, group_ids: Sequence[Hashable], *, norm_adv_by_std_in_grpo: bool = True
) -> torch.Tensor:
    """Return one advantage per response: (reward - mean of the group) / standard deviation of the group.

    Args:
        rewards: [batch], one number per response.
        group_ids: [batch], equal for responses to the same prompt. Responses may be in any order.
        norm_adv_by_std_in_grpo: False omits the division (Dr. GRPO, arXiv 2503.20783). The deviation is unbiased (over
            n - 1).

    Returns [batch] FP32 on the device of `rewards`. A group of one response has no baseline, so its advantage is the
    reward itself (divided by 1 + `EPSILON`), as in verl."""
    rewards = rewards.detach().float()
    members: dict[Hashable, list[int]] = {}
    for index, group_id in zip(range(len(rewards)), group_ids, strict=True):
        members.setdefault(group_id, []).append(index)
    advantages = torch.empty_like(rewards)
    for indices in members.values():
        group = rewards[indices]
        if len(indices) == 1:
            centred, std = group, torch.ones_like(group)
        elif (group == group[0]).all():
            centred, std = torch.zeros_like(group), torch.ones_like(group)
        else:
            centred, std = group - group.mean(), group.std()
        advantages[indices] = centred / (std + EPSILON) if norm_adv_by_std_in_grpo else centred
    return advantages
