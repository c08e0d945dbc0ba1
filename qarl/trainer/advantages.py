"""GRPO's group-relative advantages (arXiv 2402.03300) for the local backend.

The same numbers as verl's `compute_grpo_outcome_advantage`, to the bit, which a test holds; written out here because
importing verl's takes seconds and starts with ray, and the local backend needs neither. One departure: a group whose
rewards are all equal has advantages of exactly 0. There verl divides the rounding error of the mean by epsilon: eight
rewards of 0.7 give every response an advantage of 0.056, and the whole group is trained up on noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from qarl.errors import UserError


def grpo_advantages(
    rewards: torch.Tensor,
    group_ids: Sequence[Hashable] | torch.Tensor,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """One advantage a response: its reward less the mean of its group, over the group's standard deviation.

    Args:
        rewards: [batch], one number a response.
        group_ids: [batch], equal for responses to the same prompt; groups may lie in any order.
        norm_adv_by_std_in_grpo: False leaves the division out (Dr. GRPO, arXiv 2503.20783).
        epsilon: added to the standard deviation (which is the unbiased one, over n - 1), in units of reward.

    Returns [batch] FP32 on the device of `rewards`. A group of one has no baseline: its advantage is the reward itself,
    as in verl. Raises ValueError if shapes differ, UserError if a reward is NaN or Inf.
    """
    ids = group_ids.tolist() if isinstance(group_ids, torch.Tensor) else list(group_ids)
    if rewards.dim() != 1 or len(ids) != rewards.shape[0]:
        raise ValueError(f"rewards must be [batch] with a group id each, got {tuple(rewards.shape)} and {len(ids)} ids")
    rewards = rewards.detach().float()
    if not rewards.isfinite().all():
        index = int((~rewards.isfinite()).nonzero()[0])
        raise UserError(
            f"the reward of response {index} is {rewards[index].item()}",
            where="reward.function",
            why="one NaN or Inf spoils the mean, and with it the advantages, of its whole group",
            fix="return a finite number for every response, for instance 0.0 if it cannot be scored",
        )

    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(ids):
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
        advantages[indices] = centred / (std + epsilon) if norm_adv_by_std_in_grpo else centred
    return advantages
