"""Write and read the checkpoints that a run resumes from. A folder appears only when it is complete, and is checked by
digest before use.

`checkpoints/step_N/` is a Hugging Face model folder with the BF16 weights of the forward, plus three files:

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.compressed_tensors import ModelFiles, write_model
from qarl.checkpoint.json_file import json_safe
from qarl.checkpoint.storage import StorageError, file_sha256, remove_folder, whole_folder
from qarl.errors import UserError
from qarl.quant.scheme import get_scheme

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
        config: dict[str, Any] = self.state["config"]
        return config

    def optimizer(self, *, mmap: bool = False) -> dict[str, Any]:
        """Return the saved `MasterOptimizer.state_dict()`. With `mmap`, tensors are read from disk on first use."""
        return self._load(OPTIMIZER_FILE, mmap=mmap)

    def rng(self) -> dict[str, Any]:
        """Return the saved state of the random generators (`qarl.trainer.checkpoints.rng_state`)."""
        return self._load(RNG_FILE)

    def _load(self, name: str, *, mmap: bool = False) -> dict[str, Any]:
        try:
            return load_dict(self.folder / name, mmap=mmap)
        except UserError as error:
            raise damaged(self.folder, f"{name} {error.why}") from error

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Turn exceptions in the `with` block into a CheckpointError that names this checkpoint and its file `name`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # which exception torch or Python raises depends on what is wrong in the file
            why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            raise damaged(self.folder, f"{name} does not contain what was saved: {why}") from error


def save_checkpoint(
    folder: Path,
    *,
    files: ModelFiles,
    weights: Iterable[tuple[str, torch.Tensor]],
    optimizer: Mapping[str, Any],
    rng: Mapping[str, Any],
    state: Mapping[str, Any],
) -> int:
    """Write a checkpoint to `folder` and return its size in bytes.

    `state`: the content of state.json without `format`, `files` and `digest`. If writing fails, raise StorageError and
    leave `folder` unchanged.
    """
    weights = list(weights)
    needed = sum(tensor.nbytes for _, tensor in weights) + _tensor_bytes(optimizer)
    with whole_folder(folder, needed_bytes=needed) as partial:
        write_model(partial, files, weights, scheme=get_scheme("bf16"))
        _save(partial / OPTIMIZER_FILE, optimizer)
        _save(partial / RNG_FILE, rng)
        parts: dict[str, dict[str, Any]] = {
            path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        content = json_safe({"format": FORMAT, **state, "files": parts})
        content["digest"] = _digest(content)
        (partial / STATE_FILE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return sum(part["bytes"] for part in parts.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every byte of the checkpoint in `folder` by digests. Return the checkpoint.

    Raise CheckpointError if it is missing or damaged, and UserError if its format is of another version of QaRL.
    """
    try:
        return _open(folder)
    except OSError as error:
        raise damaged(folder, f"it cannot be read: {error.filename}: {error.strerror}") from error


def _open(folder: Path) -> Checkpoint:
    state = _read_state(folder)
    for name, part in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise damaged(folder, f"{name} is missing")
        if (size := path.stat().st_size) != part["bytes"]:
            raise damaged(folder, f"{name} has {size} bytes, but {part['bytes']} were written")
        if file_sha256(path) != part["sha256"]:
            raise damaged(folder, f"the bytes of {name} differ from those that were written (by SHA-256)")
    return Checkpoint(folder, state)


def load_dict(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a dict of tensors and plain values from a file of `torch.save`, without running any code in the file.

    Raise UserError if the file cannot be read, has no dict, or has objects that need code to be loaded.
    """
    why = "holds no dict"
    cause: Exception | None = None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if isinstance(content, dict):
            return content
    except pickle.UnpicklingError as error:
        # torch's message is not shown, because it recommends loading the file anyway.
        name = re.search(r"GLOBAL (\S+)", str(error))
        named = f", such as {name[1].rstrip('.,')}" if name else ""
        why = f"holds more than tensors and plain values{named}; it is not loaded because it could run any code"
        cause = error
    except Exception as error:  # which exception torch raises depends on where the file is damaged
        why, cause = " ".join(f"cannot be read: {type(error).__name__}: {error}".split())[:300], error
    fix = "copy the file again, or use a different checkpoint"
    raise UserError(f"{path.name} cannot be used", where=str(path), why=why, fix=fix) from cause


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every `step_N` in `parent`, newest first. Do not check them."""
    found = []
    try:
        paths = list(parent.iterdir()) if parent.is_dir() else []
    except OSError as error:
        raise UserError("the checkpoints cannot be listed", where=str(parent), why=error.strerror) from error
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def newest_good(parent: Path) -> tuple[Checkpoint | None, list[tuple[Path, CheckpointError]]]:
    """Return the newest undamaged checkpoint in `parent`, and (folder, error) of each newer, damaged checkpoint."""
    problems: list[tuple[Path, CheckpointError]] = []
    for _, folder in list_checkpoints(parent):
        try:
            return open_checkpoint(folder), problems
        except CheckpointError as error:
            problems.append((folder, error))
    return None, problems


def prune(parent: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints of `parent`. If `keep` is None, remove nothing."""
    for _, folder in list_checkpoints(parent)[keep:] if keep is not None else ():
        remove(folder)


def remove(folder: Path) -> None:
    """Remove the checkpoint in `folder`. Raise StorageError if that fails."""
    try:
        remove_folder(folder)
    except OSError as error:
        raise StorageError(f"{folder} could not be removed", why=error.strerror) from error


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of the names and digests (`tensor_digest`) of all tensors, sorted by name."""
    whole = hashlib.sha256()
    for name, digest in sorted((name, tensor_digest(tensor)) for name, tensor in tensors):
        whole.update(f"{name}:{digest};".encode())
    return whole.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            why=f"it has no {STATE_FILE}" if folder.is_dir() else "there is no such folder",
            fix="use a folder that a run has written: OUTPUT_DIR/NAME/checkpoints/step_N",
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        digest = state.pop("digest")
        whole = _digest(state) == digest
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged(folder, f"{STATE_FILE} is cut short or not JSON") from error
    if not whole:
        raise damaged(folder, f"{STATE_FILE} has changed since it was written (its digest differs)")
    if state.get("format") != FORMAT:
        raise UserError(  # not a CheckpointError: the checkpoint is undamaged, so it must not be skipped
            f"the checkpoint in {folder} has format {state.get('format')}, but this version of QaRL reads {FORMAT}",
            fix="resume with the version of QaRL that wrote it; its versions are in state.json",
        )
    return dict(state)


def damaged(folder: Path, why: str) -> CheckpointError:
    """Return the error for a damaged checkpoint. `why`: the damage."""
    fix = "use an earlier checkpoint (trainer.resume_mode=auto does so automatically), or copy this one again"
    return CheckpointError(f"the checkpoint in {folder} is damaged", why=why, fix=fix)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _save(path: Path, content: Any) -> None:
    """Call `torch.save`. If the disk refuses to write, raise the OSError that torch hides in a RuntimeError."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(_tensor_bytes, content.values()))
    return sum(map(_tensor_bytes, content)) if isinstance(content, (list, tuple)) else 0
