"""The host memory beside GPUs: what verl offloads, and a sleeping engine's weights."""

from __future__ import annotations

import pytest
from checkout import ROOT

from qarl.checks.memory import OFFLOAD, MemoryEstimate, estimate
from qarl.checks.memory_parts import GIB
from qarl.checks.model_folder import hf_config_or_carried
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.doctor.model import host_memory

OFFLOADED = "masters and optimizer state, offloaded"
OFFLOADING = [f"verl.{key}=true" for key in OFFLOAD]
MODEL = ROOT / "qarl" / "bench" / "models" / "Qwen3-30B-A3B"


def paper(*changes: str) -> Config:
    return load_config(
        [f"config={ROOT / 'configs' / 'qwen3_30b_w4a16.yaml'}", f"model.path={MODEL}", *changes]
    )


def planned(config: Config, device: str = "cuda") -> MemoryEstimate:
    size = ModelSize.from_config(hf_config_or_carried(str(MODEL), False)[0])
    return estimate(size, config, device=device, gpu_memory_bytes=80 * 10**9)


def names(memory: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.bytes for part in memory.host}


def test_what_is_offloaded_is_in_host_memory():
    memory = planned(paper(*OFFLOADING))
    on_gpu = sum(
        part.bytes
        for part in planned(paper()).parts
        if "masters" in part.name or "state" in part.name
    )
    assert names(memory) == {OFFLOADED: pytest.approx(on_gpu, rel=1e-6)}
    assert memory.processes == 8 and memory.host_total == 8 * names(memory)[OFFLOADED]
    assert memory.host_lines()[-1].startswith("together on one machine, 8 GPUs: ")
    local = load_config([f"config={ROOT / 'configs' / 'quickstart.yaml'}", f"model.path={MODEL}"])
    assert (
        names(planned(local)).keys() == {"vLLM's weights while it sleeps"}
        and planned(local).processes == 1
    )


def test_the_doctor_compares_it_with_this_machine():
    memory = planned(paper(*OFFLOADING))
    error = host_memory(memory, 100 * GIB)
    assert (
        error.status == "error"
        and "of 100.0 GiB that are free" in error.what
        and "offloading" in error.fix
    )
    assert [OFFLOADED in line for line in error.lines] == [True, False]
    assert host_memory(memory, memory.host_total).status == "warning"
    assert host_memory(memory, 2 * memory.host_total).status == "ok"
    elsewhere = host_memory(memory, None)
    assert elsewhere.status == "note" and "GiB for tensors" in elsewhere.what and elsewhere.lines
    assert not planned(paper()).host
