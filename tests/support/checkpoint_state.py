"""Checkpoints and interrupted runs on disk, with every key that state.json has: tests change the few they are about."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.checkpoint.model_files import ModelFiles
from qarl.checkpoint.resumable import STATE_FILE, _digest, save_checkpoint
from qarl.checkpoint.storage import file_sha256
from qarl.config import Config, OptimConfig
from qarl.trainer.master_optimizer import MasterOptimizer


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    """Writing past `limit` bytes of a file fails, by the operating system (EFBIG), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


CONFIG = {"seed": 0, "trainer": {}, "quant": {}, "optim": {}}


def whole_state(**changes: Any) -> dict[str, Any]:
    """The `state` that `save_checkpoint` takes, with `changes`."""
    state: dict[str, Any] = {
        "step": 3,
        "weight_version": 3,
        "config": CONFIG,
        "versions": {"python": "3"},
        "sampler": {
            "num_prompts": 4,
            "batch_size": 2,
            "seed": 0,
            "shuffle": True,
            "batches_drawn": 3,
        },
        "train_prompts": "0" * 64,
        "inputs": {},
        "weights": "0" * 64,
        "published": {"model.norm.weight": "0" * 64},
        "metrics": {"mismatch/k3": 1e-4},
    }
    return state | changes


def write_bare(folder: Path, **changes: Any) -> None:
    """A whole checkpoint whose files hold nothing to restore."""
    folder.mkdir(parents=True)
    for name in ("optimizer.pt", "rng.pt", "config.json"):
        (folder / name).write_text(name)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in folder.iterdir()
    }
    seal(folder, {"format": 1, **whole_state(**changes), "files": files})


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with its digest, as `save_checkpoint` and as somebody who changed it would."""
    (folder / STATE_FILE).write_text(json.dumps(state | {"digest": _digest(state)}))


def reseal(folder: Path, **changes: Any) -> None:
    """Change keys of state.json (`...` drops one), take the files as they are now, and seal it again."""
    state = json.loads((folder / STATE_FILE).read_text())
    del state["digest"]
    for name in state["files"]:
        path = folder / name
        state["files"][name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    seal(folder, {key: value for key, value in (state | changes).items() if value is not ...})


def interrupted_run(settings: Config, *steps: int, finished: bool = False) -> Path:
    """A run folder with bare checkpoints (a state file each), metrics, and a summary if it is finished."""
    run_dir = settings.run_dir
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step}"
        write_bare(folder, step=step, config=settings.model_dump(mode="json"))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    if finished:
        (run_dir / "summary.json").write_text('{"finished": true}')
    return run_dir


def save(
    model_folder: Path, folder: Path, *, step: int = 3, name: Literal["adamw", "muon"] = "adamw"
) -> dict[str, torch.Tensor]:
    """A checkpoint after one optimizer step; the weights in it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    optimizer = MasterOptimizer(
        model.named_parameters(), OptimConfig(name=name, lr=1e-2), seed=0, total_training_steps=9
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.accumulate()
    optimizer.step()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_checkpoint(
        folder,
        files=ModelFiles.of(model, AutoTokenizer.from_pretrained(model_folder)),
        weights=weights.items(),
        optimizer=optimizer.state_dict(),
        rng={"torch": torch.get_rng_state(), "python": random.getstate()},
        state=whole_state(step=step, metrics={"mismatch/k3": float("nan"), "loss": 0.1}),
    )
    return weights


class Malicious:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))
