"""The reward of `twin_run`, in a file that a worker loads without torch."""

from __future__ import annotations

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """A reward of every kind: equal in a group, negative, or of many values."""
    words = solution_str.split()
    if data_source == "equal":
        return 0.7
    value = sum(int(word[1:]) for word in words) % 7 / 7 + 0.1 * len(words)
    value += 0.01 * extra_info["weight"] + 0.001 * int(ground_truth[1:])
    return value - 1.5 if data_source == "signed" else value
