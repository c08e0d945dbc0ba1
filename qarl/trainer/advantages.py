"""Advantages for the local backend: GRPO's (arXiv 2402.03300), and verl's functions for the other estimators.

Equal rewards teach nothing: their advantages are exactly 0 in every backend (`equal_rewards`). This departs from verl
and TRL, which divide the rounding error of a mean by a small number. For eight rewards of 0.7 verl's GRPO returns 0.056
for every response, and this noise reinforces the whole group. Otherwise `grpo_advantages` equals verl's
`compute_grpo_outcome_advantage` bit for bit. verl's function is not used, because its import takes seconds and loads
ray.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from qarl.config import Config
from qarl.config.objectives import get_objective
from qarl.objectives import verl_functions

EPSILON = 1e-6
"""verl's addend to the standard deviation, in units of reward."""
_GROUP = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
_BATCH = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
_BASELINES = dict.fromkeys(_GROUP, "group") | dict.fromkeys(_BATCH, "batch")
"""verl's estimators whose advantage of equal rewards is 0 but for rounding."""


def step_advantages(config: Config, rewards: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the advantage of each response of a step, FP32 [batch]. `rewards`: [batch], `lengths`: in tokens.

    The responses to a prompt must be consecutive. `algorithm.adv_estimator` chooses the function:
        grpo      GRPO's advantages
        dr_grpo   GRPO's without the division by the standard deviation (arXiv 2503.20783)
        rloo      verl's function
    If the objective whitens rewards (reinforce), verl's function does so over the tokens of the batch instead. An empty
    response has no token there, while its reward counts in the baseline of its group.
    """
    algorithm = config.algorithm
    group_ids = [i // config.rollout.n for i in range(len(lengths))]
    if get_objective(config.actor.loss).whitens_rewards:
        return _verls("reinforce_plus_plus", rewards, group_ids, torch.tensor(lengths))
    if algorithm.adv_estimator == "rloo":
        return _verls("rloo", rewards, group_ids, torch.tensor(lengths))
    norm = algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator == "grpo"
    return grpo_advantages(rewards, group_ids, norm_adv_by_std_in_grpo=norm)


def _verls(name: str, rewards: Tensor, group_ids: Sequence[Hashable], lengths: Tensor) -> Tensor:
    """Return the advantages of verl's estimator `name`."""
    advantages = verl_functions.outcome_advantages(name, rewards, group_ids, lengths)
    equal = equal_rewards(rewards, group_ids, baseline=baseline_of(name), filled=lengths > 0)
    return advantages.masked_fill(equal.to(advantages.device), 0.0)


def baseline_of(estimator: str) -> str | None:
    """Return what verl's estimator compares a reward with: the rewards of its "group", or of the whole "batch". None:
    with something else, such as a critic, so that equal rewards need not have equal advantages."""
    return _BASELINES.get(estimator)


def equal_rewards(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    *,
    baseline: str | None,
    filled: Tensor,
) -> Tensor:
    """Return which responses are compared only with rewards equal to their own, bool [batch].

    A group of one response has no baseline and is not counted.

    Args:
        rewards: FP32 [batch]. Equal means equal in every bit of FP32.
        group_ids: [batch], equal for responses to the same prompt. Responses may be in any order.
        baseline: the value of `baseline_of`.
        filled: bool [batch], the responses that have a token. A baseline over the batch leaves out the others.
    """
    equal = torch.zeros(len(rewards), dtype=torch.bool)
    if baseline is None:
        return equal
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        if baseline == "group":
            members.setdefault(group_id, []).append(index)
        elif filled[index]:
            members.setdefault("batch", []).append(index)
    for indices in members.values():
        group = rewards[indices]
        equal[indices] = len(indices) > 1 and bool((group == group[0]).all())
    return equal


def grpo_advantages(
    rewards: Tensor, group_ids: Sequence[Hashable], *, norm_adv_by_std_in_grpo: bool = True
) -> Tensor:
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
            centred = group
            std = torch.ones_like(group)
        elif (group == group[0]).all():
            centred = torch.zeros_like(group)
            std = torch.ones_like(group)
        else:
            centred = group - group.mean()
            std = group.std()
        advantages[indices] = centred / (std + EPSILON) if norm_adv_by_std_in_grpo else centred
    return advantages
