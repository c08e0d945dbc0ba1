"""The reward of `lengths`, in a file that a worker of either backend loads by its path."""

from __future__ import annotations

import zlib
from typing import Any


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 0 or 1 by the response's text: of random weights any reward is arbitrary, but it must differ."""
    return float(zlib.crc32(solution_str.encode()) & 1)
