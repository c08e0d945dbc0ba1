"""What a resume checks: weights, prompts and published tensors; and that no code in a checkpoint runs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_state import Malicious, reseal
from engine_helpers import config as run_config
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl.checkpoint.model_files import ModelFiles
from qarl.checkpoint.resumable import CheckpointError, load_dict, open_checkpoint, save_checkpoint
from qarl.checks.model_folder import load_tokenizer
from qarl.data.prompts import Prompt, PromptSampler
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker
from qarl.step.old_log_probs import Skipping
from qarl.trainer.checkpoints import (
    Checkpoints,
    forward_weights,
    restore,
    rng_state,
    set_rng_state,
    training_state,
)
from qarl.trainer.master_optimizer import MasterOptimizer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def prompts(answer: str = "1") -> list[Prompt]:
    return [Prompt(i, "x", [], [i, 3], answer) for i in range(4)]


def make_trainer(folder: Path, output: Path, **changes: Any) -> Any:
    """The part of a trainer that `restore` and `Checkpoints` see: a policy with its optimizer and data, no engine."""
    settings = run_config(output, f"model.path={folder}", "quant.align=off", "quant.scheme=bf16")
    policy = Policy.load(settings)
    optimizer = MasterOptimizer(
        policy.model.named_parameters(), settings.optim, seed=0, total_training_steps=9
    )
    parts = SimpleNamespace(train_prompts=prompts(), sampler=PromptSampler(4, 2), record={})
    trainer = SimpleNamespace(
        config=settings,
        policy=policy,
        optimizer=optimizer,
        parts=parts,
        engine=SimpleNamespace(weight_version=3),
        source=SimpleNamespace(schedule=SimpleNamespace(skipping=Skipping())),
        step=0,
        tokenizer=load_tokenizer(str(folder))[0],
    )
    for name, value in changes.items():
        setattr(trainer.parts, name, value)
    return trainer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def original(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one optimizer step."""
    folder = tmp_path_factory.mktemp("run") / "step_3"
    save(make_trainer(model_folder, folder.parent), folder)
    return folder


def save(trainer: Any, folder: Path) -> None:
    """Take an optimizer step, and save a checkpoint of step 3."""
    for parameter in trainer.policy.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.accumulate()
    trainer.optimizer.step()
    next(trainer.parts.sampler)
    trainer.step = 3
    save_checkpoint(
        folder,
        files=ModelFiles.of(trainer.policy.model, trainer.tokenizer),
        weights=forward_weights(trainer.policy),
        optimizer=trainer.optimizer.state_dict(),
        rng=rng_state(),
        state=training_state(trainer, {"mismatch/k3": 1e-4}),
    )


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "step_3"))


def restored(model_folder: Path, folder: Path, **changes: Any) -> Any:
    trainer = make_trainer(model_folder, folder.parent, **changes)
    restore(trainer, open_checkpoint(folder))
    return trainer


def test_the_untouched_one_is_restored(model_folder: Path, folder: Path) -> None:
    trainer = restored(model_folder, folder)
    assert trainer.step == 3 and trainer.parts.sampler.batches_drawn == 1
    reseal(folder)
    restored(model_folder, folder)


def test_the_loss_scale_of_a_run_in_fp16_is_restored(model_folder: Path, tmp_path: Path) -> None:
    trainers = [make_trainer(model_folder, tmp_path) for _ in range(2)]
    for trainer in trainers:
        parameters = trainer.policy.model.named_parameters()
        optim = trainer.config.optim
        trainer.optimizer = MasterOptimizer(
            parameters, optim, seed=0, total_training_steps=9, scale_loss=True
        )
    interrupted, resumed = trainers
    for overflow in (True, True, False):
        interrupted.optimizer.loss_scale.updated(overflow=overflow)
    save(interrupted, tmp_path / "step_3")
    restore(resumed, open_checkpoint(tmp_path / "step_3"))
    assert vars(resumed.optimizer.loss_scale) == vars(interrupted.optimizer.loss_scale)
    assert resumed.optimizer.loss_scale.overflows == 2


@pytest.fixture
def generators_stay() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


@pytest.mark.usefixtures("generators_stay")
@pytest.mark.parametrize("drawn", [0, 1])
def test_every_global_generator_continues_where_it_was(tmp_path: Path, drawn: int) -> None:
    """Normal numbers come in pairs, in Python and in NumPy: the second of a pair belongs to the state, too."""

    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    for _ in range(drawn):
        draw()
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    set_rng_state(load_dict(tmp_path / "rng.pt"))
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt"])
def test_code_in_a_checkpoint_does_not_run(folder: Path, tmp_path: Path, name: str) -> None:
    torch.save({"inner": Malicious(tmp_path / "ran")}, folder / name)
    reseal(folder)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=f"(?s){name} cannot be used.*could run any code") as caught:
        checkpoint.optimizer() if name == "optimizer.pt" else checkpoint.rng()
    assert "weights_only" not in str(
        caught.value
    )  # torch's own text recommends to load it all the same
    assert not (tmp_path / "ran").exists()


def test_other_weights_with_whole_files_are_refused(model_folder: Path, folder: Path) -> None:
    """Every file's digest is right; only that of the weights themselves tells."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    optimizer["masters"]["model.norm.weight"] = weights["model.norm.weight"].float()
    torch.save(optimizer, folder / "optimizer.pt")
    reseal(folder)
    with pytest.raises(CheckpointError, match="the restored weights differ from the saved ones"):
        restored(model_folder, folder)


@pytest.mark.parametrize(
    "other",
    [
        prompts("2"),
        prompts()[::-1],
        prompts()[:3],
        [Prompt(i, "x", [], [i, 4], "1") for i in range(4)],
    ],
    ids=["answers", "order", "fewer", "tokens"],
)
def test_other_prompts_are_refused(model_folder: Path, folder: Path, other: list[Prompt]) -> None:
    with pytest.raises(UserError, match="training prompts differ from those of the checkpoint"):
        restored(model_folder, folder, train_prompts=other)


def test_weights_that_lack_a_tensor_are_of_another_model(model_folder: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reseal(folder)
    with pytest.raises(
        UserError, match=r"(?s)checkpoint belongs to a different model.*model\.norm\.weight"
    ):
        restored(model_folder, folder)


@pytest.fixture
def resumed(
    model_folder: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """A function that takes the first step after a resume with a k3: its metrics, and what was said."""
    before = rng_state()

    def resume(k3: float) -> tuple[dict[str, float], str]:
        trainer = make_trainer(model_folder, folder.parent)
        checkpoints = Checkpoints(trainer, open_checkpoint(folder))
        capfd.readouterr()
        with Tracker(trainer.config.run_dir, ["console"], 9, {}) as tracker:
            checkpoints.resumed(tracker)
            metrics = checkpoints.after_step({"mismatch/k3": k3}, tracker, stopped=False)
        captured = capfd.readouterr()
        return metrics, captured.out + captured.err

    yield resume
    set_rng_state(before)


def test_published_tensors_that_are_not_the_checkpoints_are_named(
    resumed: Any, folder: Path
) -> None:
    metrics, said = resumed(1e-4)
    assert metrics["resume/published_equal"] == 1 and "warning" not in said
    published = open_checkpoint(folder).state["published"]
    reseal(folder, published=published | {"model.norm.weight": "0" * 64})
    metrics, said = resumed(1e-4)
    assert metrics["resume/published_equal"] == 0
    assert (
        "warning: 1 published tensors differ from the checkpoint's: ['model.norm.weight']" in said
    )


@pytest.mark.parametrize(("k3", "warned"), [(9e-4, False), (2e-3, True)])
def test_a_mismatch_ten_times_that_of_the_step_before_is_said(
    resumed: Any, k3: float, warned: bool
) -> None:
    metrics, said = resumed(k3)
    assert metrics["resume/k3_before"] == 1e-4 and metrics["resume/k3"] == k3
    assert ("more than ten times as much as before" in said) == warned
