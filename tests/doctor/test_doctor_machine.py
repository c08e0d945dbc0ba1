"""The doctor on machines that are shared: ranks that divide its memory, GPUs that are too few, vLLM's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_rig import topic_of

from qarl.checks import driver
from qarl.doctor import memory
from qarl.doctor.target import Target
from qarl.vllm_versions import release

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("startable_run")]


def test_ranks_on_one_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def compare(topic: Any, found: Any, peak: tuple[str, int], limit: int, where: str) -> None:
        seen.append((peak[1] // found.peak[1], where))

    monkeypatch.setattr(memory, "_compare", compare)
    for ranks in (1, 2):
        topic_of("memory", "backend=verl", f"trainer.n_gpus_per_node={ranks}")
    assert seen == [(1, "1 rank on this CPU"), (2, "2 ranks on this CPU")]


@pytest.mark.parametrize(("there", "missing"), [(1, True), (2, False), (None, False)])
def test_gpus_that_are_not_there(there: int | None, missing: bool) -> None:
    target = Target("cuda", "this machine", True, 90, 2**36, gpus=there)
    found = topic_of("machine", "backend=verl", "trainer.n_gpus_per_node=2", target=target)
    said = [f for f in found if "trainer.n_gpus_per_node is 2" in f.what]
    assert [f.status for f in said] == ["error"] * missing


@pytest.mark.parametrize(("entry", "differs"), [("qkv_proj", True), ("o_proj", False)])
def test_a_name_that_vllm_alone_has_is_found(entry: str, differs: bool) -> None:
    found = topic_of("ignore list", f"quant.ignore=[lm_head, model.layers.0.self_attn.{entry}]")
    where = [f.where for f in found if "would quantize different layers" in f.what]
    assert len(where) == differs
    assert all("only in vLLM: model.layers.0.self_attn" in str(text) for text in where)


@pytest.mark.parametrize(("version", "status"), [("550.54.15", "error"), ("580.65.06", "ok")])
def test_the_driver_is_looked_at(version: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Sep  5\n")
    monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = [f for f in topic_of("machine") if f"NVIDIA driver {version}" in f.what]
    assert [f.status for f in found] == [status]


def test_a_vllm_that_qarl_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.status for f in topic_of("packages") if "is a release that QaRL supports (rollouts)" in f.what] == ["ok"]
    monkeypatch.setattr(release, "installed_version", lambda: "0.30.1")
    found = [f for f in topic_of("packages") if f.what == "QaRL cannot use this vLLM for: rollouts"]
    assert [f.status for f in found] == ["error"] and "vLLM 0.30.1 is installed" in str(found[0].why)
