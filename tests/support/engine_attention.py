"""The mark of tests that call vLLM's own attention operator for CPUs."""

from __future__ import annotations

import pytest

from qarl.kernels.cpu.layer_ops import attention_unavailable

needs_engine_attention = pytest.mark.skipif(
    attention_unavailable("cpu", 32) is not None, reason=str(attention_unavailable("cpu", 32))
)
