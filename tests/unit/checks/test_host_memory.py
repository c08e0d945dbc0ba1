"""The host memory beside GPUs: what verl offloads, and a sleeping engine's weights."""

from __future__ import annotations

import pytest
from checkout import ROOT

from qarl.checks.memory import MemoryEstimate, estimate
from qarl.checks.memory_terms import GIB
from qarl.checks.model_folder import hf_config_or_carried
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.doctor.model import host_memory

OFFLOADED = "masters and optimizer state, offloaded"
TRAINER, ENGINE = "kept for delta publishes: trainer", "kept for delta publishes: engine"
MODEL = ROOT / "qarl" / "bench" / "models" / "Qwen3-30B-A3B"


def paper(*changes: str) -> Config:
    given = [f"config={ROOT / 'configs' / 'qwen3_30b_w4a16.yaml'}", f"model.path={MODEL}", *changes]
    return load_config(given)


def planned(config: Config, device: str = "cuda", *, offload: bool = False) -> MemoryEstimate:
    size = ModelSize.from_config(hf_config_or_carried(str(MODEL), False)[0])
    return estimate(size, config, device=device, gpu_memory_bytes=80 * 10**9, offload=offload)


def names(found: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.bytes for part in found.host}


def test_no_process_keeps_tensors_where_trainer_and_engine_share_a_gpu():
    for delta in ("auto", "off"):
        found = planned(paper(f"publish.delta={delta}"))
        assert found.host == () and found.host_lines() == []
    on_cpu = planned(paper(), "cpu")
    assert on_cpu.host == () and {TRAINER, ENGINE} <= {part.name for part in on_cpu.parts}
    assert not {TRAINER, ENGINE} & {part.name for part in planned(paper()).parts}


def test_separate_rollout_workers_keep_the_published_tensors():
    """One copy in the trainer's first process, and one in each of eight engines."""
    separate = "verl.actor_rollout_ref.rollout.checkpoint_engine.backend=qarl"
    found = planned(paper(separate))
    published = 29_896_998_912 * (4 + 16 / 128) / 8 + 2 * (30_532_122_624 - 29_896_998_912) + 18_624 * 16
    assert names(found) == {TRAINER: published, ENGINE: published} and found.host_total == 9 * published
    assert [line.split()[-1] for line in found.host_lines()[:2]] == ["once", "GPU"]
    assert planned(paper(separate, "publish.delta=off")).host == ()


def test_what_is_offloaded_is_in_host_memory():
    found = planned(paper(), offload=True)
    on_gpu = sum(part.bytes for part in planned(paper()).parts if "masters" in part.name or "state" in part.name)
    assert names(found) == {OFFLOADED: pytest.approx(on_gpu, rel=1e-6)}
    assert found.processes == 8 and found.host_total == 8 * names(found)[OFFLOADED]
    assert found.host_lines()[-1].startswith("together on one machine, 8 GPUs: ")
    local = load_config([f"config={ROOT / 'configs' / 'quickstart.yaml'}", f"model.path={MODEL}"])
    assert names(planned(local)).keys() == {"vLLM's weights while it sleeps"} and planned(local).processes == 1


def test_the_doctor_compares_it_with_this_machine():
    found = planned(paper(), offload=True)
    error = host_memory(found, 100 * GIB)
    assert error.status == "error" and "of 100.0 GiB that are free" in error.what and "offloading" in error.fix
    assert [OFFLOADED in line for line in error.lines] == [True, False]
    assert host_memory(found, found.host_total).status == "warning"
    assert host_memory(found, 2 * found.host_total).status == "ok"
    elsewhere = host_memory(found, None)
    assert elsewhere.status == "note" and "GiB for tensors" in elsewhere.what and elsewhere.lines
    assert not planned(paper()).host
