"""A resumed run takes the steps of one that was never interrupted, bit for bit; real vLLM."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from cpu_features import needs_w4a16_cpu
from engine_helpers import config

from qarl.checkpoint.resumable import list_checkpoints, open_checkpoint
from qarl.config import Config
from qarl.metrics.tracker import read_metrics
from qarl.trainer.local import LocalTrainer
from qarl.trainer.loop import train
from qarl.trainer.resume import open_run

pytestmark = [pytest.mark.usefixtures("in_the_checkout"), pytest.mark.vllm, needs_w4a16_cpu]

SMALL = {
    "trainer.total_training_steps": "4",
    "trainer.val_before_train": "false",
    "trainer.val_max_prompts": "16",
    "trainer.test_freq": "2",
    "trainer.save_freq": "2",
    "trainer.plots": "false",
    "trainer.logger": "[console]",
    "actor.old_log_probs": "recompute",  # with `auto` the first step after a resume recomputes, and counts so
}
# Seconds, and what only a resumed run or one with other checkpoints has.
NOT_COMPARED = ("timing_s/", "startup/", "resume/", "checkpoint/", "publish/")


def small(folder: Path, name: str, *overrides: str) -> Config:
    settings = {**SMALL, "name": name, **dict(override.split("=", 1) for override in overrides)}
    return config(folder, *(f"{key}={value}" for key, value in settings.items()))


def run(settings: Config) -> dict:
    with open_run(settings) as checkpoint:
        return train(settings, checkpoint=checkpoint)


def values(settings: Config) -> dict[int, dict[str, str]]:
    return {
        entry["step"]: {
            k: float(v).hex() for k, v in entry.items() if not k.startswith(NOT_COMPARED)
        }
        for entry in read_metrics(settings.run_dir)
    }


def final_state(settings: Config) -> list:
    checkpoint = open_checkpoint(settings.run_dir / "checkpoints" / "step_4")
    state = checkpoint.state
    files = [
        state["files"][name]["sha256"] for name in ("model.safetensors", "optimizer.pt", "rng.pt")
    ]
    return [state["weights"], state["published"], state["sampler"], state["weight_version"], *files]


def fail_once_in_step(monkeypatch, number: int) -> None:
    original = LocalTrainer.update

    def update(self, *arguments):
        if self.step == number - 1:
            monkeypatch.setattr(LocalTrainer, "update", original)
            raise FloatingPointError("made to fail")
        return original(self, *arguments)

    monkeypatch.setattr(LocalTrainer, "update", update)


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant.scheme=w4a16"],
        ["quant.align=off", "optim.name=muon", "optim.muon_lr=1e-3", "optim.master_dtype=bf16"],
    ],
    ids=["adamw, fp32 masters", "muon, bf16 masters"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, capfd, overrides):
    """Interrupted in step 4, after step 3 was logged: step 3 is taken again from the checkpoint of step 2, and its
    metrics are logged once."""
    whole = small(tmp_path, "whole", *overrides)
    parts = small(tmp_path, "parts", *overrides)
    run(whole)
    fail_once_in_step(monkeypatch, 4)
    with pytest.raises(FloatingPointError):
        run(parts)
    assert [step for step, _ in list_checkpoints(parts.run_dir / "checkpoints")] == [2]
    assert read_metrics(parts.run_dir)[-1]["step"] == 3
    capfd.readouterr()
    summary = run(parts)
    output = capfd.readouterr().out
    assert summary["finished"] is True and summary["steps"] == 4
    assert values(parts) == values(whole)
    assert final_state(parts) == final_state(whole)
    first = read_metrics(parts.run_dir)[2]
    assert first["resume/step"] == 2 and first["resume/published_equal"] == 1
    assert first["resume/k3"] == first["mismatch/k3"]
    assert first["resume/k3_before"] == read_metrics(parts.run_dir)[1]["mismatch/k3"]
    assert (
        "resumes from" in output
        and "first step after the resume" in output
        and "warning" not in output
    )
    lines = [
        json.loads(line)["step"]
        for line in (parts.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == [1, 2, 3, 4]


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path, monkeypatch, capfd):
    """The operating system refuses the checkpoint of step 2 (file size limit); that of step 3 is written again."""
    reference = small(tmp_path, "reference")
    refused = small(tmp_path, "refused", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2")
    run(reference)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = LocalTrainer.train_step

    def with_a_full_disk_in_step_2(self):
        metrics = original(self)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000 if self.step == 2 else soft, hard))
        return metrics

    monkeypatch.setattr(LocalTrainer, "train_step", with_a_full_disk_in_step_2)
    capfd.readouterr()
    summary = run(refused)
    output = capfd.readouterr().out
    assert (
        "warning: the checkpoint of step 2 failed, and the run goes on without it" in output
        and "File too large" in output
    )
    assert [entry["checkpoint/failed"] for entry in read_metrics(refused.run_dir)] == [0, 1, 0, 0]
    assert summary["failed_checkpoints"] == 1
    assert [step for step, _ in list_checkpoints(refused.run_dir / "checkpoints")] == [4, 3]
    assert values(refused) == values(reference)
    assert final_state(refused) == final_state(reference)


def test_a_run_that_ended_before_its_last_line_was_written_only_finishes(tmp_path):
    settings = small(tmp_path, "late", "trainer.total_training_steps=2")
    run(settings)
    summary_file = settings.run_dir / "summary.json"
    summary_file.write_text(json.dumps(json.loads(summary_file.read_text()) | {"finished": False}))
    metrics = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    (settings.run_dir / "metrics.jsonl").write_text(metrics[0] + "\n" + metrics[1][:50])
    summary = run(settings)
    assert summary["finished"] is True and summary["steps"] == 2
    assert [entry["step"] for entry in read_metrics(settings.run_dir)] == [1, 2]
    assert (settings.run_dir / "export" / "model.safetensors").is_file()
