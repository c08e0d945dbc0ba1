"""QaRL's Triton kernels, compiled by the Triton of the GPU lock for four compute capabilities.

tests/integration/kernels/test_triton.py asks the same of the Triton of the CPU lock, which is newer.
"""

from __future__ import annotations

import pytest
from gpu_lock import required
from triton_rig import SHARED_LIMIT, compile_for, entry_kernels

required()

SPILLS = {120: 24}
"""Largest allowed bytes of spilled registers. For capability 12.0 the assembler of Triton 3.6 stores 12 or 24 bytes in
five kernels with TMA, although registers are free: they use at most 128 of 255 registers."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_every_kernel_compiles_and_fits(target: int) -> None:
    report = compile_for(target)
    assert set(report["kernels"]) == entry_kernels()
    compiled = report["resources"]
    assert {name: kernel["error"] for name, kernel in compiled.items() if "error" in kernel} == {}
    spilled = {name: kernel for name, kernel in compiled.items() if kernel["spill_bytes"]}
    assert not [name for name, kernel in spilled.items() if kernel["registers"] > 128], spilled
    assert max((kernel["spill_bytes"] for kernel in spilled.values()), default=0) <= SPILLS.get(
        target, 0
    ), spilled
    assert {
        name: kernel
        for name, kernel in compiled.items()
        if kernel["shared_bytes"] > SHARED_LIMIT[target]
    } == {}
