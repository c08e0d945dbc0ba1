"""Prompts and rewards."""

from __future__ import annotations

from qarl.lazy import exporter

__getattr__ = exporter(
    __name__,
    {
        "prompts": ("PromptDataset", "PromptSampler", "check_disjoint", "check_vocabulary", "load_prompts"),
        "rewards": ("RewardFn", "get_reward_fn", "score_responses"),
    },
)
