"""Checkpoints and exports that an earlier version wrote (tests/data/formats.tar.gz) load in this one.

The archive's runs took two steps with commit 4fc89e9, whose checkpoints have no record of what the run read. No engine
starts here; nightly/e2e/test_resume_stored.py resumes the runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_formats import RUNS, unpack

from qarl.checkpoint.export import ExportRequest, export
from qarl.checkpoint.read_weights import open_source, read_all
from qarl.checks.check import RunInputs
from qarl.config import Config, load_config
from qarl.errors import UserError
from qarl.step.old_log_probs import Skipping
from qarl.trainer.checkpoints import differing_tensors, restore
from qarl.trainer.input_changes import NOT_RECORDED
from qarl.trainer.master_optimizer import MasterOptimizer
from qarl.trainer.policy import Policy
from qarl.trainer.resume import find_start
from qarl.verl.resume import find_verl_start


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory has the stored runs."""
    unpack(tmp_path)
    monkeypatch.chdir(tmp_path)


def settings(run: str, *overrides: str) -> Config:
    return load_config(["config=run.yaml", f"name={run}", *RUNS[run], *overrides])


def idle_trainer(config: Config, inputs: RunInputs) -> Any:
    """The part of a trainer that `restore` sees."""
    policy = Policy.load(config)
    return SimpleNamespace(
        config=config,
        policy=policy,
        optimizer=MasterOptimizer(
            policy.model.named_parameters(), config.optim, seed=0, total_training_steps=2
        ),
        parts=SimpleNamespace(train_prompts=inputs.train_prompts, sampler=inputs.sampler),
        source=SimpleNamespace(schedule=SimpleNamespace(skipping=Skipping())),
        tokenizer=inputs.tokenizer,
        step=0,
    )


@pytest.mark.parametrize("run", ["local", "local_adapter"])
def test_a_local_checkpoint_is_restored(run: str) -> None:
    config = settings(run)
    inputs = RunInputs(config)
    start = find_start(config, inputs.record)
    assert start.checkpoint is not None and start.checkpoint.step == 2
    assert start.notes == (NOT_RECORDED,)
    trainer = idle_trainer(config, inputs)
    restore(trainer, start.checkpoint)
    assert trainer.step == 2 and trainer.parts.sampler.batches_drawn == 2
    assert differing_tensors(start.checkpoint.state["published"], trainer.policy) == []
    Path("train.jsonl").write_text(Path("train.jsonl").read_text().replace("t3", "t4"))
    trainer.parts.train_prompts = RunInputs(config).train_prompts
    with pytest.raises(UserError, match="the training prompts differ from those of the checkpoint"):
        restore(trainer, start.checkpoint)


def test_a_verl_checkpoint_is_found_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings("verl")
    assert find_verl_start(config, RunInputs(config).record) == (2, True)
    assert NOT_RECORDED in capsys.readouterr().err
    folder = Path("runs/verl/checkpoints/global_step_2")
    source = open_source(folder, trust_remote_code=False)
    names = {name for name, _ in read_all(folder, source.tensors(torch.float32))}
    assert names == load_file("model/model.safetensors").keys()


@pytest.mark.parametrize("run", RUNS)
def test_an_export_of_a_stored_checkpoint_has_the_bytes_of_the_stored_export(run: str) -> None:
    export(ExportRequest(Path("runs") / run, Path("again")))
    stored_files = sorted((Path("runs") / run / "export").rglob("*.safetensors"))
    assert len(stored_files) == (2 if "adapter" in run else 1)
    for path in stored_files:
        before = load_file(path)
        after = load_file(Path("again") / path.relative_to(Path("runs") / run / "export"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
