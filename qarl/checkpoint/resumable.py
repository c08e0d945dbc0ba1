"""Write and read the checkpoints that a run resumes from. A folder appears only when it is complete, and is checked by
digest before use.

`checkpoints/step_N/` is a Hugging Face model folder with the BF16 weights of the forward, plus three files. With
adapters it has the adapter in peft's format (`qarl.lora.adapter`) and no model:

    optimizer.pt   FP32 masters if they exist, moments, seed and count of the stochastic rounding, place in the schedule
    rng.pt         global generators of torch, CUDA, NumPy and Python
    state.json     step, weight version, config, versions, data position, metrics of the step, digests of the published
                   tensors, size and SHA-256 of every other file, and a digest of state.json itself

TBPO has no state to save. verl deletes the oldest checkpoint before it writes the next one. QaRL deletes it only after
the next one is complete.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from qarl.checkpoint.model_files import ModelFiles, write_model
from qarl.checkpoint.storage import file_sha256, json_safe, remove_folder, whole_folder
from qarl.errors import UserError
from qarl.lora.adapter import Adapter, write_adapter
from qarl.schemes import UNQUANTIZED

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
RNG_FILE = "rng.pt"
FORMAT = 1
_NAME = re.compile(r"step_([0-9]+)")


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been checked. `state`: the content of its state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the step after which the checkpoint was written."""
        return {name: float(value) for name, value in self.state["metrics"].items()}

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the run, as nested dicts of JSON types."""
        return cast(dict[str, Any], self.state["config"])

    def optimizer(self, *, mmap: bool = False) -> dict[str, Any]:
        """Return the saved `MasterOptimizer.state_dict()`. With `mmap`, tensors are read from disk on first use."""
        return load_dict(self.folder / OPTIMIZER_FILE, mmap=mmap)

    def rng(self) -> dict[str, Any]:
        """Return the saved state of the random generators (`qarl.trainer.checkpoints.rng_state`)."""
        return load_dict(self.folder / RNG_FILE)


def save_checkpoint(
    folder: Path,
    *,
    files: ModelFiles,
    weights: Iterable[tuple[str, torch.Tensor]],
    optimizer: Mapping[str, Any],
    rng: Mapping[str, Any],
    state: Mapping[str, Any],
    adapter: Adapter | None = None,
) -> int:
    """Write a checkpoint to `folder` and return its size in bytes.

    `adapter`: what is trained instead of `weights`. Then the folder has the adapter, and no model.
    `state`: the content of state.json without `format`, `files` and `digest`. If writing fails, raise StorageError and
    leave `folder` unchanged.
    """
    weights = list(weights)
    leaves = tree_leaves([weights, optimizer])
    needed = sum(part.nbytes for part in leaves if isinstance(part, torch.Tensor))
    with whole_folder(folder, needed_bytes=needed) as partial:
        if adapter is None:
            write_model(partial, files, weights, scheme=UNQUANTIZED)
        else:
            write_adapter(partial, adapter)
        for name, content in ((OPTIMIZER_FILE, optimizer), (RNG_FILE, rng)):
            with (partial / name).open("wb") as file:
                torch.save(content, file)
        parts: dict[str, dict[str, Any]] = {}
        for path in sorted(partial.rglob("*")):
            if path.is_file():
                name = path.relative_to(partial).as_posix()
                parts[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        whole = json_safe({"format": FORMAT, **state, "files": parts})
        whole["digest"] = _digest(whole)
        text = json.dumps(whole, indent=1, allow_nan=False)
        (partial / STATE_FILE).write_text(f"{text}\n", encoding="utf-8")
    return sum(part["bytes"] for part in parts.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every byte of the checkpoint in `folder` by digests. Return the checkpoint.

    Raise CheckpointError if it is missing or damaged, and UserError if its format is of another version of QaRL, or if
    its name is that of another step.
    """
    state = _read_state(folder)
    _refuse_other_step(folder, int(state["step"]))
    for name, part in state["files"].items():
        try:
            digest = file_sha256(folder / name)
        except OSError as error:
            raise damaged(folder, f"{name} cannot be read: {error.strerror}") from error
        if digest != part["sha256"]:
            raise damaged(
                folder, f"the bytes of {name} differ from those that were written (by SHA-256)"
            )
    return Checkpoint(folder, state)


def load_dict(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a dict of tensors and plain values from a file of `torch.save`, without running any code in the file.

    Raise UserError if the file cannot be read, has no dict, or has objects that need code to be loaded.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(content, dict):
            raise TypeError("it holds no dict")
        return content
    except Exception as error:  # which exception torch raises depends on where the file is damaged
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, pickle.UnpicklingError):
            # torch's message recommends loading the file anyway.
            why = "it holds more than tensors and plain values; it is not loaded, because it could run any code"
        fix = "copy the file again, or use a different checkpoint"
        raise UserError(f"{path.name} cannot be used", where=str(path), why=why, fix=fix) from error


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every `step_N` in `parent`, newest first. Do not check them."""
    paths = parent.iterdir() if parent.is_dir() else ()
    steps = []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            steps.append((int(match[1]), path))
    return sorted(steps, reverse=True)


def newest_good(parent: Path) -> tuple[Checkpoint | None, list[tuple[Path, CheckpointError]]]:
    """Return the newest undamaged checkpoint in `parent`, and (folder, error) of each newer, damaged checkpoint."""
    problems: list[tuple[Path, CheckpointError]] = []
    for _, folder in list_checkpoints(parent):
        try:
            return open_checkpoint(folder), problems
        except CheckpointError as error:
            problems.append((folder, error))
    return None, problems


def prune(parent: Path, keep: int | None, *, spared: Path | None = None) -> None:
    """Remove all but the newest `keep` checkpoints of `parent`, and `spared`. If `keep` is None, remove nothing.

    Links stay, because removing one would not free the space of its checkpoint."""
    if keep is None:
        return
    for _, folder in list_checkpoints(parent)[keep:]:
        if not folder.is_symlink() and folder != spared:
            remove_folder(folder)


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of the names and digests (`tensor_digest`) of all tensors, sorted by name."""
    whole = hashlib.sha256()
    for name, digest in sorted((name, tensor_digest(tensor)) for name, tensor in tensors):
        whole.update(f"{name}:{digest};".encode())
    return whole.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
    flat = tensor.detach().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise _no_checkpoint(folder)
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = state.pop("digest") == _digest(state)
    except (OSError, ValueError, KeyError) as error:
        raise damaged(folder, f"{STATE_FILE} is cut short or not JSON") from error
    if not whole:
        raise damaged(folder, f"{STATE_FILE} has changed since it was written (its digest differs)")
    if state.get("format") != FORMAT:
        raise UserError(  # not a CheckpointError: the checkpoint is undamaged, so it must not be skipped
            f"the checkpoint in {folder} has format {state.get('format')}, but this version of QaRL reads {FORMAT}",
            fix="resume with the version of QaRL that wrote it; its versions are in state.json",
        )
    return state


def _refuse_other_step(folder: Path, step: int) -> None:
    """Raise UserError if `folder` is named after another step than `step`. The order of the checkpoints, and which of
    them a resume supersedes, depend on their names. A copy may have any name that is not of the form step_N."""
    match = _NAME.fullmatch(folder.name)
    if match and int(match[1]) != step:
        raise UserError(  # not a CheckpointError: the checkpoint is undamaged, so it must not be skipped
            f"the checkpoint in {folder} is of step {step}, but its name is that of step {int(match[1])}",
            where=str(folder / STATE_FILE),
            why="a run orders its checkpoints by the steps in their names, so it would replace the wrong ones",
            fix=f"rename the folder to step_{step}, or move it out of the run",
        )


def _no_checkpoint(folder: Path) -> CheckpointError:
    why = f"it has no {STATE_FILE}"
    fix = "use a folder that a run has written: OUTPUT_DIR/NAME/checkpoints/step_N"
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
    elif (folder / "actor").is_dir():
        why = f"{why}; it is a checkpoint of backend=verl"
        fix = "set backend=verl, or use a checkpoint of the local backend"
    else:
        inside = list_checkpoints(folder) or list_checkpoints(folder / "checkpoints")
        if inside:
            fix = f"give the folder of one checkpoint, such as {inside[0][1]}"
    return CheckpointError(f"there is no checkpoint in {folder}", why=why, fix=fix)


def damaged(folder: Path, why: str) -> CheckpointError:
    """Return the error for a damaged checkpoint. `why`: the damage."""
    fix = "use an earlier checkpoint (trainer.resume_mode=auto does so automatically), or copy this one again"
    return CheckpointError(f"the checkpoint in {folder} is damaged", why=why, fix=fix)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
