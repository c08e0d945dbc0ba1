"""Prompts and rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.lazy import exporter

if TYPE_CHECKING:
    from qarl.data.prompts import Prompt, PromptDataset, PromptSampler, check_disjoint, check_vocabulary, load_prompts
    from qarl.data.rewards import RewardFn, check_reward_fn, get_reward_fn, score_responses

__all__ = [
    "Prompt",
    "PromptDataset",
    "PromptSampler",
    "RewardFn",
    "check_disjoint",
    "check_reward_fn",
    "check_vocabulary",
    "get_reward_fn",
    "load_prompts",
    "score_responses",
]

__getattr__ = exporter(
    __name__,
    {
        "prompts": ("Prompt", "PromptDataset", "PromptSampler", "check_disjoint", "check_vocabulary", "load_prompts"),
        "rewards": ("RewardFn", "check_reward_fn", "get_reward_fn", "score_responses"),
    },
)
