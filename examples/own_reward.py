"""A reward function of your own: right answers first, then short ones.

    qarl train config=quickstart.yaml reward.function=examples/own_reward.py:short_and_right

The signature is that of verl's custom rewards, so one function serves every backend. It is called with keyword
arguments, once per response, and tried once before the run starts (docs/do/reward.md).
"""

from __future__ import annotations

from typing import Any

from qarl.data.rewards import arithmetic

LENGTH = 60
"""Characters that an answer may have without losing anything."""


def short_and_right(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """0 for a wrong sum; for the right one 1, less up to 0.5 for each character over `LENGTH`, a hundredth each."""
    right = arithmetic(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth
    )
    return right * (1 - min(0.5, 0.01 * max(0, len(solution_str) - LENGTH)))
