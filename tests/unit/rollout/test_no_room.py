"""vLLM 0.24's messages when it does not start on a GPU, as an H200 printed them."""

from __future__ import annotations

import pytest

from qarl.rollout.engine_config import no_room

PROFILING = "Error in memory profiling. Initial free memory 92.07 GiB, current free memory 131.4 GiB. This happens when"
NO_BLOCKS = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing. See"


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        (PROFILING, "another process freed memory", "start the run again"),
        (NO_BLOCKS, "No available memory for the cache blocks", "raise rollout.gpu_memory_utilization"),
    ],
)
def test_the_error_says_what_to_do(text: str, why: str, fix: str) -> None:
    error = no_room(ValueError(text), 0.06)
    assert error is not None
    assert "gpu_memory_utilization=0.06" in str(error) and why in str(error) and fix in str(error)


def test_other_errors_stay_as_they_are() -> None:
    assert no_room(RuntimeError("CUDA error: out of memory"), 0.5) is None
