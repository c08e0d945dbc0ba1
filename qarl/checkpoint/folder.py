"""Checkpoints that a run resumes from: on disk whole or not at all, and checked by digest before they are used.

`checkpoints/step_N/` is a Hugging Face folder with the BF16 weights the forward sees, loadable as it is, plus

    optimizer.pt   FP32 masters if they exist, moments, generator of the stochastic rounding, place in the schedule
    rng.pt         global generators of torch, CUDA, NumPy and Python
    state.json     step, weight version, config, versions, data position, metrics of the step, digest of what was
                   published, and size and SHA-256 of every other file; at its end a digest of itself

TBPO has no state. verl deletes the oldest checkpoint before it writes the next one; here the next one is whole on disk
before an older one goes.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """A checkpoint that is incomplete, damaged or none at all."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole; `state` is what its state.json holds."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step after which it was written."""
        return {name: float(value) for name, value in self.state["metrics"].items()}

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, nested, in JSON types."""
        config: dict[str, Any] = self.state["config"]
        return config

    def optimizer(self, *, mmap: bool = False) -> dict[str, Any]:
        """`MasterOptimizer.state_dict()`; with `mmap` its tensors are read from disk when they are used."""
        return self._load(OPTIMIZER_FILE, mmap=mmap)

    def rng(self) -> dict[str, Any]:
        """The generators, as `qarl.trainer.checkpoints.rng_state` gave them."""
        return self._load(RNG_FILE)

    def _load(self, name: str, *, mmap: bool = False) -> dict[str, Any]:
        try:
            return load_dict(self.folder / name, mmap=mmap)
        except UserError as error:
            raise damaged(self.folder, f"{name} {error.why}") from error

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Makes errors raised inside name this checkpoint and its file `name`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # torch's and Python's own, by what is missing or of another type
            why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            raise damaged(self.folder, f"{name} does not hold what was saved: {why}") from error


def save_checkpoint(
    folder: Path,
    *,
    files: ModelFiles,
    weights: Iterable[tuple[str, torch.Tensor]],
    optimizer: Mapping[str, Any],
    rng: Mapping[str, Any],
    state: Mapping[str, Any],
) -> int:
    """Write a checkpoint to `folder` and return its bytes. `state`: what state.json holds besides `format` and `files`.

    Raises:
        StorageError: the disk did not take it; `folder` is as it was before.
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
    """The checkpoint in `folder`, every byte of it read and compared with its digest.

    Raises:
        CheckpointError: what is wrong with it.
        UserError: it is of another format.
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
            raise damaged(folder, f"{name} has {size} bytes, {part['bytes']} were written")
        if file_sha256(path) != part["sha256"]:
            raise damaged(folder, f"the bytes of {name} are not those that were written (SHA-256 differs)")
    return Checkpoint(folder, state)


def load_dict(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """A dict of tensors and plain values in a file of `torch.save`; nothing in it can run code.

    Raises:
        UserError: the file cannot be read, holds something else, or something that only code could make.
    """
    why = "holds no dict"
    cause: Exception | None = None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if isinstance(content, dict):
            return content
    except pickle.UnpicklingError as error:
        # The text of torch's recommends to load it all the same.
        name = re.search(r"GLOBAL (\S+)", str(error))
        named = f", such as {name[1].rstrip('.,')}" if name else ""
        why = f"holds more than tensors and plain values{named}, which is not loaded: it could run any code"
        cause = error
    except Exception as error:  # what torch raises depends on where the file is damaged
        why, cause = " ".join(f"cannot be read: {type(error).__name__}: {error}".split())[:300], error
    fix = "copy the file again, or use another checkpoint"
    raise UserError(f"{path.name} cannot be used", where=str(path), why=why, fix=fix) from cause


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `step_N` in `parent`, newest first; nothing is checked."""
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


def newest_good(parent: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest checkpoint in `parent` that is whole, and what is wrong with each newer one."""
    problems: list[CheckpointError] = []
    for _, folder in list_checkpoints(parent):
        try:
            return open_checkpoint(folder), problems
        except CheckpointError as error:
            problems.append(error)
    return None, problems


def prune(parent: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints of `parent` (None: keep all)."""
    for _, folder in list_checkpoints(parent)[keep:] if keep is not None else ():
        try:
            remove_folder(folder)
        except OSError as error:
            raise StorageError(f"{folder} could not be removed", why=error.strerror) from error


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and `tensor_digest`s, in order of name."""
    whole = hashlib.sha256()
    for name, digest in sorted((name, tensor_digest(tensor)) for name, tensor in tensors):
        whole.update(f"{name}:{digest};".encode())
    return whole.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)};".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            why=f"it has no {STATE_FILE}" if folder.is_dir() else "there is no such folder",
            fix="give a folder that trainer.save_freq wrote, OUTPUT_DIR/NAME/checkpoints/step_N",
        )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        digest = state.pop("digest")
        whole = _digest(state) == digest
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(folder, f"{STATE_FILE} is cut short or not JSON") from error
    if not whole:
        raise damaged(folder, f"{STATE_FILE} is not as it was written (its digest differs)")
    if state.get("format") != FORMAT:
        raise UserError(  # it is whole: no reason to pass it over
            f"the checkpoint in {folder} has format {state.get('format')}, this version reads {FORMAT}",
            fix="resume with the version of QaRL that wrote it; its versions are in state.json",
        )
    if wrong := [key for key, fits in _STATE.items() if not fits(state.get(key))]:
        raise damaged(folder, f"{STATE_FILE} is not QaRL's: {', '.join(wrong)} missing or of another type")
    return dict(state)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, int | float) and abs(value) < 10**300


def _is_file(name: str, part: Any) -> bool:
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    known = isinstance(part, dict) and _is_count(part.get("bytes")) and isinstance(part.get("sha256"), str)
    return inside and known


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), dict) for name in ("trainer", "quant", "optim"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_STATE: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "weight_version": _is_count,
    "config": _is_config,
    "versions": lambda value: isinstance(value, dict),
    "sampler": lambda value: isinstance(value, dict),
    "train_prompts": _is_text,
    "weights": _is_text,
    "published": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "metrics": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "files": lambda value: (
        isinstance(value, dict)
        and {OPTIMIZER_FILE, RNG_FILE, "config.json"} <= value.keys()
        and all(_is_file(*item) for item in value.items())
    ),
}
"""Every key of state.json, and whether a value is of its type."""


def damaged(folder: Path, why: str) -> CheckpointError:
    """The error of a checkpoint that cannot be used."""
    fix = "use an earlier checkpoint (trainer.resume_mode=auto does so by itself), or copy this one again"
    return CheckpointError(f"the checkpoint in {folder} is damaged", why=why, fix=fix)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _save(path: Path, content: Any) -> None:
    """`torch.save`, with the operating system's own error if the disk refuses; torch hides it in a RuntimeError."""
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
