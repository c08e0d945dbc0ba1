"""The host memory beside GPUs: published tensors that both sides keep for delta publishes, and what verl offloads."""

from __future__ import annotations

from typing import Any

import pytest
from checkout import ROOT

from qarl.checks.memory import OFFLOAD, MemoryEstimate, estimate
from qarl.checks.memory_terms import GIB
from qarl.checks.model_folder import hf_config_or_carried
from qarl.checks.model_size import ModelSize
from qarl.config import Config, load_config
from qarl.doctor import memory as doctor
from qarl.doctor.findings import Topic
from qarl.verl.process import memory_lines

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


def test_both_sides_keep_the_whole_model_for_each_gpu():
    """30.5e9 weights: 4 + 16/128 bits of each quantized one. 151,936 x 2,048 in BF16, twice, and the routers."""
    found = planned(paper())
    config = hf_config_or_carried(str(MODEL), False)[0]
    embeddings = 2 * 2 * config.vocab_size * config.hidden_size
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    quantized = 48 * (attention + 128 * 3 * 768 * 2048)
    expected = quantized * (4 + 16 / 128) / 8 + embeddings
    assert names(found).keys() == {TRAINER, ENGINE}
    for size in names(found).values():
        assert expected < size < 1.01 * expected + 2 * 48 * 128 * 2048
        assert 16.5e9 < size < 17e9
    assert found.processes == 8 and found.host_total == 8 * sum(names(found).values()) > 260e9
    assert found.host_lines()[-1].startswith("together on one machine, 8 GPUs: 24")


def test_what_the_options_change():
    without = planned(paper("publish.delta=off"))
    assert without.host == () and without.host_lines() == []
    on_cpu = planned(paper(), "cpu")
    assert on_cpu.host == () and {TRAINER, ENGINE} <= {part.name for part in on_cpu.parts}
    assert not {TRAINER, ENGINE} & {part.name for part in planned(paper()).parts}, "not in the GPU's memory"
    offloaded = names(planned(paper(), offload=True))["masters and optimizer state, offloaded"]
    on_gpu = sum(part.bytes for part in planned(paper()).parts if "masters" in part.name or "state" in part.name)
    assert offloaded == pytest.approx(on_gpu, rel=1e-6)


def test_one_process_keeps_one_set():
    local = load_config([f"config={ROOT / 'configs' / 'quickstart.yaml'}", f"model.path={MODEL}"])
    found = planned(local)
    assert names(found).keys() == {ENGINE, "vLLM's weights while it sleeps"} and found.processes == 1


def finding(found: MemoryEstimate, limit: int | None) -> Any:
    topic = Topic("memory")
    doctor._host(topic, found, limit)
    return topic.findings[-1] if topic.findings else None


def test_the_doctor_compares_it_with_this_machine():
    found = planned(paper())
    error = finding(found, 200 * GIB)
    assert error.status == "error" and "of 200.0 GiB that are free" in error.what and "publish.delta=off" in error.fix
    assert [TRAINER in line for line in error.lines] == [True, False, False]
    assert finding(found, found.host_total).status == "warning"
    assert finding(found, 2 * found.host_total).status == "ok"
    elsewhere = finding(found, None)
    assert elsewhere.status == "note" and "GiB for delta publishes" in elsewhere.what and elsewhere.lines
    assert finding(planned(paper("publish.delta=off")), 1) is None


def test_dry_runs_show_it():
    lines = memory_lines(paper(), on_cpu=False)
    assert len([line for line in lines if line.startswith("host memory, ")]) == 3
    both = memory_lines(paper(*(f"verl.{key}=true" for key in OFFLOAD)), on_cpu=False)
    assert any("host memory, masters and optimizer state, offloaded" in line for line in both)
    assert not [line for line in memory_lines(paper(), on_cpu=True) if line.startswith("host memory")]


def test_the_docs_have_the_plans_figures() -> None:
    """docs/configs.md, for a machine with 8 GPUs."""
    figures = []
    for name, model in (
        ("qwen2_5_math_1_5b", "Qwen2.5-Math-1.5B"),
        ("qwen2_5_math_7b", "Qwen2.5-Math-7B"),
        ("qwen3_8b", "Qwen3-8B"),
        ("qwen3_30b", "Qwen3-30B-A3B"),
    ):
        folder = MODEL.parent / model
        config = load_config([f"config={ROOT / 'configs' / f'{name}_w4a16.yaml'}", f"model.path={folder}"])
        size = ModelSize.from_config(hf_config_or_carried(str(folder), False)[0])
        figures.append(estimate(size, config, device="cuda", gpu_memory_bytes=80 * 10**9).host_total / GIB)
    *first, last = [f"{figure:.0f}" for figure in figures]
    words = " ".join((ROOT / "docs" / "configs.md").read_text().split())
    assert f"with 8 GPUs {', '.join(first)} and {last} GiB for the four models" in words
