"""vLLM 0.24's exceptions when it does not start on a GPU for want of memory."""

from __future__ import annotations

import pytest
import torch

from qarl.errors import UserError
from qarl.rollout.engine_config import explain

PROFILING = "Error in memory profiling. Initial free memory 92.07 GiB, current free memory 131.4 GiB. This happens when"
NO_BLOCKS = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing. See"
TOO_LONG = "To serve at least one request with the model's max seq len (4096), (2.0 GiB KV cache is needed, which is"
SHARE = "raise rollout.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("text", "why", "fix"),
    [
        (PROFILING, "another process freed memory", "start the run again"),
        (NO_BLOCKS, "No available memory for the cache blocks", SHARE),
        (TOO_LONG, "2.0 GiB KV cache is needed", SHARE),
    ],
)
def test_the_error_says_what_to_do(
    text: str, why: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain(ValueError(text), 0.06)  # on a CPU the key has no effect
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    explain(RuntimeError("CUDA error: out of memory"), 0.06)
    with pytest.raises(UserError) as raised:
        explain(ValueError(text), 0.06)
    shown = str(raised.value)
    assert "gpu_memory_utilization=0.06" in shown and why in shown and fix in shown
