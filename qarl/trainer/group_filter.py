"""Dynamic sampling: groups whose rewards are all equal are replaced by those of other prompts (DAPO, arXiv 2503.14476).

The advantages of such a group are 0, so it teaches nothing and only makes the batch smaller. A step therefore samples
further batches of prompts until enough groups differ, at most `max_num_gen_batches` in all.

Departures from DAPO's recipe in verl, which raises an error when that number is reached: the rest of the batch is then
filled with groups of equal rewards, in the order in which they were sampled, and the step goes on. A reward is equal
if all bits of its FP32 value are; verl compares the standard deviation of a metric with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from qarl.data.prompts import Prompt
from qarl.data.reward_outcomes import Scored as Outcome
from qarl.rollout.requests import RolloutBatch


@dataclass(frozen=True)
class Scored:
    """Responses, each with its prompt, and their rewards, FP32 [responses]. Responses to a prompt are consecutive.
    `outcomes`: the rewards as the reward functions returned them."""

    prompts: list[Prompt]
    responses: RolloutBatch
    rewards: torch.Tensor
    outcomes: Sequence[Outcome] = ()

    def select(self, rows: Sequence[int]) -> Scored:
        """Return these rows, in this order."""
        return Scored(
            [self.prompts[row] for row in rows],
            self.responses.select(rows),
            self.rewards[[*rows]],
            [self.outcomes[row] for row in rows] if self.outcomes else (),
        )

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """Return the rows of all parts, one part after another."""
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            RolloutBatch.joined([part.responses for part in parts]),
            torch.cat([part.rewards for part in parts]),
            [outcome for part in parts for outcome in part.outcomes],
        )


def groups_that_differ(
    sample: Callable[[int], Scored], *, groups: int, size: int, limit: int
) -> tuple[Scored, dict[str, float]]:
    """Sample batches until `groups` groups of `size` responses have different rewards, at most `limit` batches.

    `sample`: samples the batch of this number, from 0. Return the first `groups` groups that differ, followed by equal
    ones if there are too few, and metrics:

        filter_groups/num_gen_batches  batches that were sampled
        filter_groups/dropped          share of the sampled groups that are not in the batch
        filter_groups/equal            groups of equal rewards in the batch
        filter_groups/score_mean       mean reward of all that was sampled
    """
    differing: list[Scored] = []
    equal: list[Scored] = []
    total = 0.0
    responses = 0
    preemptions = 0
    batches = 0
    while batches < limit and len(differing) < groups:
        part = sample(batches)
        batches += 1
        total += float(part.rewards.double().sum())
        responses += len(part.rewards)
        preemptions += part.responses.preemptions
        for start in range(0, len(part.rewards), size):
            group = part.select(range(start, start + size))
            same = bool((group.rewards == group.rewards[0]).all())
            (equal if same else differing).append(group)
    chosen = (differing + equal)[:groups]
    metrics = {
        "filter_groups/num_gen_batches": batches,
        "filter_groups/dropped": 1 - groups * size / responses,
        "filter_groups/equal": max(0, groups - len(differing)),
        "filter_groups/score_mean": total / responses,
    }
    joined = Scored.joined(chosen)
    return replace(joined, responses=replace(joined.responses, preemptions=preemptions)), metrics
