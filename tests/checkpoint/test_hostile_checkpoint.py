"""Checkpoints that somebody changed and sealed again: their content is checked, not believed, and none of it runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_state import Malicious, reseal, whole_state, write_bare
from engine_helpers import config as run_config
from random_models import save_random_model
from safetensors.torch import load_file, save_file

from qarl.checkpoint.compressed_tensors import ModelFiles
from qarl.checkpoint.folder import CheckpointError, load_dict, newest_good, open_checkpoint, prune, save_checkpoint
from qarl.checkpoint.storage import recover, remove_folder
from qarl.checks.model_folder import load_tokenizer
from qarl.data import Prompt, PromptSampler
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker
from qarl.optim.loss_scale import LossScale
from qarl.trainer.checkpoints import Checkpoints, forward_weights, restore, rng_state, set_rng_state, training_state
from qarl.trainer.optim import MasterOptimizer
from qarl.trainer.policy import Policy

pytestmark = pytest.mark.usefixtures("in_the_checkout")


def prompts(answer: str = "1") -> list[Prompt]:
    return [Prompt(i, "x", [], [i, 3], answer) for i in range(4)]


def make_trainer(folder: Path, output: Path, **changes: Any) -> Any:
    """The part of a trainer that `restore` and `Checkpoints` see: a policy with its optimizer and data, no engine."""
    settings = run_config(output, f"model.path={folder}", "quant.align=off", "quant.scheme=bf16")
    policy = Policy.load(settings)
    optimizer = MasterOptimizer(policy.model.named_parameters(), settings.optim, seed=0, total_training_steps=9)
    parts = SimpleNamespace(train_prompts=prompts(), sampler=PromptSampler(4, 2))
    trainer = SimpleNamespace(
        config=settings,
        policy=policy,
        optimizer=optimizer,
        loss_scale=LossScale(active=False),
        parts=parts,
        engine=SimpleNamespace(weight_version=3),
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
    trainer = make_trainer(model_folder, folder.parent)
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
    return folder


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


# state.json: every key missing, and of other types.

WRONG: dict[str, list[Any]] = {
    "format": [...],
    "step": [..., "3", 3.5, -1, None, True, [3]],
    "weight_version": [..., "3", None, -1],
    "config": [..., None, [], "x", {}, {"trainer": {}, "quant": [], "optim": {}}],
    "versions": [..., [], "x"],
    "sampler": [..., [], 3],
    "train_prompts": [..., 3, None],
    "weights": [..., 3, None],
    "published": [..., [], {"a": 3}],
    "metrics": [..., [], {"a": "x"}, {"a": None}, {"a": [1]}, {"a": 10**400}],
    "files": [..., [], {}, None, "x"],
}
WRONG_FILES: list[Any] = [None, {}, {"bytes": 3}, {"bytes": "3", "sha256": "x"}, {"bytes": 3, "sha256": 3}, [3], -1]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]], ids=repr)
def test_state_with_a_key_missing_or_of_another_type(tmp_path: Path, key: str, value: Any) -> None:
    write_bare(tmp_path / "step_3")
    open_checkpoint(tmp_path / "step_3")
    reseal(tmp_path / "step_3", **{key: value})
    with pytest.raises(UserError, match=key):
        open_checkpoint(tmp_path / "step_3")


def test_the_table_has_every_key(original: Path) -> None:
    state = json.loads((original / "state.json").read_text())
    assert state.keys() - {"digest"} == WRONG.keys() == whole_state().keys() | {"format", "files"}


@pytest.mark.parametrize("part", WRONG_FILES, ids=repr)
def test_entries_of_files(tmp_path: Path, part: Any) -> None:
    write_bare(tmp_path / "step_3")
    files = open_checkpoint(tmp_path / "step_3").state["files"]
    reseal(tmp_path / "step_3", files=files | {"rng.pt": part})
    with pytest.raises(CheckpointError, match="files"):
        open_checkpoint(tmp_path / "step_3")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_files_outside_the_folder(tmp_path: Path, name: str) -> None:
    write_bare(tmp_path / "step_3")
    files = open_checkpoint(tmp_path / "step_3").state["files"]
    reseal(tmp_path / "step_3", files=files | {name: {"bytes": 1, "sha256": "x"}})
    with pytest.raises(CheckpointError, match="files"):
        open_checkpoint(tmp_path / "step_3")


CONTENT: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "cut short": b'{"format": 1, "step"',
    "a list": b"[1]",
    "a number": b"1",
    "null": b"null",
    "deep": b"[" * 100_000,
    "deep and closed": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a long number": b'{"step": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
}


@pytest.mark.parametrize("kind", CONTENT)
def test_a_state_of_any_content_is_passed_over(tmp_path: Path, kind: str) -> None:
    write_bare(tmp_path / "step_2", step=2)
    write_bare(tmp_path / "step_3")
    (tmp_path / "step_3" / "state.json").write_bytes(CONTENT[kind])
    checkpoint, problems = newest_good(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2 and len(problems) == 1


def test_a_state_that_is_a_folder(tmp_path: Path) -> None:
    write_bare(tmp_path / "step_3")
    (tmp_path / "step_3" / "state.json").unlink()
    (tmp_path / "step_3" / "state.json").mkdir()
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "step_3")


# Pickles.


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(folder / name, weights_only=True)
    changed = change(content)
    torch.save(content if changed is None else changed, folder / name)
    reseal(folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain pickle"])
def test_a_malicious_pickle_is_neither_run_nor_a_raw_error(
    folder: Path, tmp_path: Path, name: str, zipped: bool
) -> None:
    ran = tmp_path / "ran"
    if zipped:
        torch.save({"inner": Malicious(ran)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps({"inner": Malicious(ran)}))
    reseal(folder)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"{name} holds more than tensors") as caught:
        checkpoint.optimizer() if name == "optimizer.pt" else checkpoint.rng()
    assert "mkdir" in str(caught.value) or not zipped
    assert "weights_only" not in str(caught.value)  # torch's own text recommends to load it all the same
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["empty", "binary", "a list", "cut", "a number", "no dict", "folder"])
def test_files_of_tensors_of_any_content(folder: Path, kind: str) -> None:
    path = folder / "rng.pt"
    if kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "no dict":
        torch.save([torch.ones(2)], path)
    elif kind == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(CONTENT[kind])
    for mmap in (False, True):
        with pytest.raises(UserError, match=r"rng.pt"):
            load_dict(path, mmap=mmap)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def put(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


OPTIMIZER = [
    *(drop(key) for key in ("name", "master_dtype", "parameter_names", "training_step", "inner", "masters")),
    put(3, "inner"),
    put({}, "inner"),
    put([], "inner", "param_groups"),
    put("x", "training_step"),
    put(3, "masters"),
    put({"model.norm.weight": torch.zeros(3)}, "masters"),
    put({"no.such": torch.zeros(3)}, "masters"),
    drop("masters", "model.norm.weight"),
    put(None, "parameter_names"),
]


@pytest.mark.parametrize("number", range(len(OPTIMIZER)))
def test_an_optimizer_of_another_content(model_folder: Path, folder: Path, number: int) -> None:
    edit(folder, "optimizer.pt", OPTIMIZER[number])
    with pytest.raises(UserError):
        restored(model_folder, folder)


RNG = [
    *(drop(key) for key in ("torch", "cuda", "numpy", "python")),
    put("x", "torch"),
    put(torch.zeros(3), "torch"),
    put(("MT19937", [1]), "numpy"),
    put(3, "python"),
    put((3, (1, 2), None), "python"),
    put(None, "cuda"),
]


@pytest.mark.parametrize("number", range(len(RNG)))
def test_generators_of_another_content(
    model_folder: Path, folder: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, "rng.pt", RNG[number])
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        trainer = make_trainer(model_folder, folder.parent)
        checkpoints = Checkpoints(trainer, open_checkpoint(folder))
        with Tracker(folder.parent / "run", [], 3, {}) as tracker, pytest.raises(CheckpointError, match=r"rng.pt"):
            checkpoints.resumed(tracker)
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


SAMPLERS = [{}, {"num_prompts": 4}, whole_state()["sampler"] | {"batches_drawn": "3"}]
SAMPLERS += [whole_state()["sampler"] | {"batches_drawn": drawn} for drawn in (None, -1, 1.5, True)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_position_in_the_data_of_another_type(model_folder: Path, folder: Path, sampler: dict[str, Any]) -> None:
    reseal(folder, sampler=sampler)
    with pytest.raises(UserError):
        restored(model_folder, folder)


# What is restored is compared with what was saved.


def test_other_weights_with_whole_files_are_refused(model_folder: Path, folder: Path) -> None:
    """Every file's digest is right; only that of the weights themselves tells."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, "optimizer.pt", put(weights["model.norm.weight"].float(), "masters", "model.norm.weight"))
    with pytest.raises(CheckpointError, match="the restored weights differ from the saved ones"):
        restored(model_folder, folder)


@pytest.mark.parametrize(
    "other",
    [prompts("2"), prompts()[::-1], prompts()[:3], [Prompt(i, "x", [], [i, 4], "1") for i in range(4)]],
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
    with pytest.raises(UserError, match=r"(?s)checkpoint belongs to a different model.*model\.norm\.weight"):
        restored(model_folder, folder)


@pytest.fixture
def resumed(model_folder: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """A function that takes the first step after a resume with a k3: its metrics, and what was said."""
    before = rng_state()

    def resume(k3: float) -> tuple[dict[str, float], str]:
        checkpoints = Checkpoints(make_trainer(model_folder, folder.parent), open_checkpoint(folder))
        capfd.readouterr()
        with Tracker(folder.parent / "run", ["console"], 9, {}) as tracker:
            checkpoints.resumed(tracker)
            metrics = checkpoints.after_step({"mismatch/k3": k3}, tracker, stopped=False)
        captured = capfd.readouterr()
        return metrics, captured.out + captured.err

    yield resume
    set_rng_state(before)


def test_published_tensors_that_are_not_the_checkpoints_are_named(resumed: Any, folder: Path) -> None:
    metrics, said = resumed(1e-4)
    assert metrics["resume/published_equal"] == 1 and "warning" not in said
    published = open_checkpoint(folder).state["published"]
    reseal(folder, published=published | {"model.norm.weight": "0" * 64})
    metrics, said = resumed(1e-4)
    assert metrics["resume/published_equal"] == 0
    assert "warning: 1 published tensors differ from the checkpoint's: ['model.norm.weight']" in said


@pytest.mark.parametrize(("k3", "warned"), [(9e-4, False), (2e-3, True)])
def test_a_mismatch_ten_times_that_of_the_step_before_is_said(resumed: Any, k3: float, warned: bool) -> None:
    metrics, said = resumed(k3)
    assert metrics["resume/k3_before"] == 1e-4 and metrics["resume/k3"] == k3
    assert ("more than ten times as much as before" in said) == warned


# Links.


def test_a_checkpoint_that_was_moved_to_another_disk_is_freed(tmp_path: Path) -> None:
    parent, disk = tmp_path / "run" / "checkpoints", tmp_path / "disk"
    for step in (1, 2, 3):
        write_bare(parent / f"step_{step}", step=step)
    disk.mkdir()
    (parent / "step_1").rename(disk / "step_1")
    (parent / "step_1").symlink_to(disk / "step_1")
    prune(parent, 2)
    assert sorted(path.name for path in parent.iterdir()) == ["step_2", "step_3"]
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("target", ["other/checkpoints/step_1", "precious"])
def test_what_is_not_the_runs_stays(tmp_path: Path, target: str) -> None:
    parent = tmp_path / "run" / "checkpoints"
    write_bare(parent / "step_2", step=2)
    write_bare(tmp_path / target, step=1)
    (parent / "step_1").symlink_to(tmp_path / target)
    prune(parent, 1)
    assert [path.name for path in parent.iterdir()] == ["step_2"]
    assert open_checkpoint(tmp_path / target).step == 1


def test_what_is_said_to_be_removed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, ended = tmp_path / "disk", 4194305
    (disk / "step_1").mkdir(parents=True)
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    (parent / f"step_1.partial-{ended}").symlink_to(disk / "step_1")
    assert recover(parent) == [f"removed {parent}/step_1.partial-{ended}, which a killed process left incomplete"]
    assert list(parent.iterdir()) == [] and list(disk.iterdir()) == []
    (parent / f"step_2.partial-{ended}").mkdir()

    def refuse(*arguments: Any, **keys: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (said,) = recover(parent)
    assert "cannot be removed: Permission denied" in said
    (parent / "step_3").mkdir()
    with pytest.raises(PermissionError):
        remove_folder(parent / "step_3")
