"""The Triton kernels on a machine without a GPU: interpreted against PyTorch, and compiled for four targets."""

from __future__ import annotations

import json

import pytest
import torch
from triton_rig import (
    ROOT,
    SHARED_LIMIT,
    compile_for,
    entry_kernels,
    run_interpreted,
    sum_layouts,
)

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 9), "ampere"),
        ((9, 0), "hopper"),
        ((10, 3), "blackwell"),
        ((12, 1), "blackwell_geforce"),
    ],
)
def test_each_capability_has_its_table(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qarl.kernels.triton import tiles

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert tiles.architecture(torch.device("cuda", 0)) == name


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_under_the_interpreter(marks: str) -> None:
    run = run_interpreted(marks)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


# `make test` compiles two configurations of each kernel for one target. All of them take a minute for each target.
TARGETS = [pytest.param(target, True, marks=pytest.mark.slow) for target in SHARED_LIMIT]


@pytest.mark.parametrize(("target", "whole"), [(90, False), *TARGETS])
def test_every_kernel_compiles_and_fits(target: int, whole: bool) -> None:
    report = compile_for(target, whole=whole)
    kernels = entry_kernels()
    assert set(report["kernels"]) == kernels, (
        "kernels missing from the AOT lists, or listed and gone"
    )
    compiled = report["resources"]
    assert {name.partition("[")[0] for name in compiled} == kernels
    assert {name: kernel["error"] for name, kernel in compiled.items() if "error" in kernel} == {}
    assert {name: kernel for name, kernel in compiled.items() if kernel["spill_bytes"]} == {}, (
        "spilled registers"
    )
    limit = SHARED_LIMIT[target]
    assert {
        name: kernel for name, kernel in compiled.items() if kernel["shared_bytes"] > limit
    } == {}
    recorded = json.loads((ROOT / "benchmarks" / "results" / "triton_aot.json").read_text())
    labels = set(recorded["rows"][f"sm_{target}"]["resources"])
    assert labels == set(report["labels"]), "run python -m benchmarks.proofs triton_aot --again"
    assert not whole or labels == set(compiled)


@pytest.mark.parametrize("width", [128, 896, 4096])
def test_a_norm_adds_in_one_order_alone_and_behind_a_sum(width: int) -> None:
    """The engine adds the residual in the norm's kernel, the trainer before it."""
    alone, behind_sum = sum_layouts("norms.rms_norm_kernel", 90, f"[COLS={width},")
    assert len(alone) == 1 and "sizePerThread" in alone[0]
    assert alone == behind_sum
