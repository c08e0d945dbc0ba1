"""Find verl's complete checkpoints on disk and read their weights, without verl, Ray or a process group.

verl's FSDP engine writes `global_step_N/actor/model_world_size_W_rank_R.pt`: a state dict of DTensors, each with rank
R's part of an FP32 master (verl/utils/checkpoint/fsdp_checkpoint_manager.py, 0.9.1). verl's own `model_merger` needs
memory for the whole model and rounds to BF16. Here the files are memory-mapped, and one tensor at a time is assembled
in FP32. It is compared with the checksums that QaRL's engine writes beside the files.

verl unpickles these files without restrictions, which could run code. So `refuse_code` checks them before verl does.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from qarl.checkpoint.folder import load_dict
from qarl.console import note
from qarl.errors import UserError
from qarl.rollout.publish.checksum import checksums

CONFIG_FOLDER = "huggingface"
_FOLDER = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_WHY = "verl's FSDP engine shards along one dimension; checkpoints of tensor-parallel trainers are not supported"


def step_of(folder: Path) -> int:
    """Return N of a folder global_step_N, or 0 if the folder has a different name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else 0


def what_is_missing(folder: Path) -> str | None:
    """Return why `folder` is not a complete checkpoint of verl, or None if it is complete.

    Files of torch.save are zip archives. The directory of an archive is written last, so a truncated file has none.
    """
    if not folder.is_dir() or not step_of(folder):
        return "there is no such folder, or its name is not global_step_N"
    if not zipfile.is_zipfile(folder / "data.pt"):
        return "data.pt, the position in the data, is missing or cut short"
    shards = {file: match for file in folder.glob("actor/*.pt") if (match := _SHARD.fullmatch(file.name))}
    ranks = {int(match[2]) for match in shards.values()}
    if not shards or len(ranks) != max(int(match[1]) for match in shards.values()):
        return "actor/ lacks the weights of at least one rank"
    torn = [file.name for file in shards if not zipfile.is_zipfile(file)]
    return f"actor/{torn[0]} is cut short" if torn else None


def whole_and_torn(checkpoints: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """Return two dicts by step: the folders of complete checkpoints, and what is missing in incomplete ones."""
    folders = {step: folder for folder in checkpoints.glob("global_step_*") if (step := step_of(folder))}
    torn = {step: problem for step, folder in folders.items() if (problem := what_is_missing(folder))}
    return {step: folder for step, folder in folders.items() if step not in torn}, torn


def load_part(file: Path) -> dict[str, Any]:
    """Load one of verl's files with memory-mapped tensors, without running code in it.

    Errors are those of `load_dict`.
    """
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns about a missing process group, but none is needed here
    try:
        with torch.serialization.safe_globals(_numpy_arrays()):
            return load_dict(file, mmap=True)
    finally:
        log.setLevel(level)


def _numpy_arrays() -> list[Any]:
    """Return the array classes in a pickle of NumPy's random state, under their names in NumPy 1 and 2."""
    make = np.ndarray((0,)).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((make, name) for name in names), np.ndarray, np.dtype, np.dtypes.UInt32DType]


def refuse_code(files: Iterable[Path]) -> None:
    """Raise UserError for the first of verl's `files` that contains anything except tensors and plain values."""
    for file in files:
        try:
            load_part(file)
        except UserError as error:
            raise UserError(
                "a file of the checkpoint cannot be used, because verl would run any code in it",
                where=str(file),
                why=error.why,
                fix="copy the checkpoint again from the machine that wrote it, or resume from a different one "
                "(trainer.resume_mode=resume_path)",
            ) from error


@dataclass(frozen=True)
class Rank:
    """One rank's tensors and their checksums. There are no checksums if QaRL's engine did not write them."""

    file: Path
    tensors: Mapping[str, torch.Tensor]
    record: Mapping[str, str]

    @classmethod
    def open(cls, file: Path) -> Rank:
        try:
            tensors = load_part(file)
            if wrong := [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]:
                raise UserError(
                    f"{file.name} cannot be used", where=str(file), why=f"its entry {wrong[0]} is not a tensor"
                )
        except UserError as error:
            raise UserError(
                "the weights of a rank cannot be read",
                where=str(file),
                why=f"{file.name} {error.why}",
                fix="copy the file again, or export a different step",
            ) from error
        record = file.with_name(file.name.replace("model_", "qarl_state_", 1)).with_suffix(".json")
        return cls(file, tensors, _read_record(record))

    def part(self, name: str) -> torch.Tensor:
        """Return this rank's part of a tensor. Raise UserError if it differs from its checksum."""
        tensor = self.tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        saved = self.record.get(f"model.{name}")
        if self.record and (saved is None or saved.lower() != f"{checksums([local])[0] & (2**64 - 1):016x}"):
            raise UserError(
                f"{name} differs from what was saved",
                where=str(self.file),
                why="its checksum is not the one recorded when the checkpoint was written",
                fix="export a different step",
            )
        return local


def _read_record(file: Path) -> Mapping[str, str]:
    """Return the checksums by name. If the file is missing, print a note and return {}."""
    if not file.is_file():
        note(f"there is no {file}, so the weights of this rank are read unchecked")
        return {}
    why = "it is not a table of checksums by name"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record, dict) and all(isinstance(value, str) for value in record.values()):
            return record
    except (OSError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise UserError(
        "QaRL's record of the checksums of this checkpoint cannot be read",
        where=str(file),
        why=f"{why}; without it, damaged weights would go unnoticed",
        fix="copy the file again from the machine that wrote the checkpoint, or export a different step. To read the "
        f"weights without the check, move {file.name} out of the folder",
    )


@dataclass(frozen=True)
class VerlWeights:
    """The weights of a checkpoint, assembled from the ranks."""

    folder: Path
    ranks: list[Rank]

    @classmethod
    def open(cls, folder: Path) -> VerlWeights:
        """Memory-map the files of `folder` (`global_step_N/actor`). Raise UserError if the checkpoint is incomplete."""
        files = {int(match[2]): file for file in folder.glob("*.pt") if (match := _SHARD.fullmatch(file.name))}
        if 0 not in files:
            raise UserError("the checkpoint has no weights", where=str(folder), why="there is no file of rank 0")
        first = Rank.open(files[0])
        sharded = (tensor for tensor in first.tensors.values() if isinstance(tensor, DTensor))
        parts = next((tensor.device_mesh.shape[-1] for tensor in sharded), 1)
        if missing := [rank for rank in range(parts) if rank not in files]:
            raise UserError(f"the checkpoint lacks the weights of rank {missing[0]}", where=str(folder))
        return cls(folder, [first, *(Rank.open(files[rank]) for rank in range(1, parts))])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.ranks[0].tensors.items()}

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, each checked when it is read. Cast floating-point tensors to `dtype` if it is given."""
        for name, first in self.ranks[0].tensors.items():
            tensor = self._whole(name, first)
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def _whole(self, name: str, first: torch.Tensor) -> torch.Tensor:
        if not isinstance(first, DTensor):
            return self.ranks[0].part(name)
        placement = first.placements[-1]
        if any(not place.is_replicate() for place in first.placements[:-1]):
            raise UserError(f"{name} is sharded along more than one dimension", where=str(self.folder), why=_WHY)
        if not isinstance(placement, Shard):
            return self.ranks[0].part(name)
        whole = torch.cat([rank.part(name) for rank in self.ranks], dim=placement.dim)
        if whole.shape != first.shape:
            raise UserError(
                f"the parts of {name} have the shape {list(whole.shape)} together, not {list(first.shape)}",
                where=str(self.folder),
                why="files of different runs are mixed",
            )
        return whole
