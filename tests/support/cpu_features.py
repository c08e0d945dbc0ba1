"""Instruction sets that this CPU can run."""

from __future__ import annotations

from pathlib import Path

import pytest


def cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


needs_w4a16_cpu = pytest.mark.skipif(
    not {"avx512f", "avx512_vnni"} <= cpu_flags(),
    reason="vLLM's W4A16 kernel on CPU needs AVX512 with VNNI",
)
