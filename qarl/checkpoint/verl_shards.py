"""verl's checkpoints on disk: which are whole, and their weights, without verl, Ray or a process group.

verl's FSDP engine writes `global_step_N/actor/model_world_size_W_rank_R.pt`: a state dict of DTensors, each with its
rank's part of the FP32 master (verl/utils/checkpoint/fsdp_checkpoint_manager.py, 0.9.1). verl's own `model_merger` does
the same for whole models in memory and rounds to BF16; here the files are mapped, and one tensor at a time is put
together, in FP32, and compared with the checksums that QaRL's engine records beside the files.

verl itself unpickles whatever a file holds. `refuse_code` looks first.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from qarl.checkpoint.folder import load_dict
from qarl.errors import UserError
from qarl.rollout.publish.checksum import checksums

CONFIG_FOLDER = "huggingface"
_FOLDER = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_WHY = "verl's FSDP engine shards along one dimension; tensor-parallel trainers are not read here"


def step_of(folder: Path) -> int:
    """N of a folder global_step_N; 0 for one of another name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else 0


def what_is_missing(folder: Path) -> str | None:
    """Why `folder` is not a complete checkpoint of verl's; None if it is one.

    Files of torch.save are zip archives, whose directory is written last: one that was cut short has none.
    """
    if not folder.is_dir() or not step_of(folder):
        return "there is no folder global_step_N of this name"
    if not zipfile.is_zipfile(folder / "data.pt"):
        return "data.pt, the position in the data, is missing or cut short"
    shards = {file: match for file in folder.glob("actor/*.pt") if (match := _SHARD.fullmatch(file.name))}
    ranks = {int(match[2]) for match in shards.values()}
    if not shards or len(ranks) != max(int(match[1]) for match in shards.values()):
        return "actor/ lacks the weights of at least one rank"
    torn = [file.name for file in shards if not zipfile.is_zipfile(file)]
    return f"actor/{torn[0]} is cut short" if torn else None


def list_whole(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every whole checkpoint, newest first."""
    folders = [folder for folder in checkpoints.glob("global_step_*") if what_is_missing(folder) is None]
    return sorted(((step_of(folder), folder) for folder in folders), reverse=True)


def list_torn(checkpoints: Path) -> dict[int, str]:
    """For each incomplete checkpoint, by step: what it lacks."""
    found = {step_of(folder): what_is_missing(folder) for folder in checkpoints.glob("global_step_*")}
    return {step: problem for step, problem in found.items() if step and problem is not None}


def load_part(file: Path) -> dict[str, Any]:
    """The content of one of verl's files, tensors mapped; no code is run. Errors: as `load_dict` of a checkpoint."""
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that there is no process group, and none is needed
    try:
        with torch.serialization.safe_globals(_numpy_arrays()):
            return load_dict(file, mmap=True)
    finally:
        log.setLevel(level)


def _numpy_arrays() -> list[Any]:
    """Classes that NumPy's random-number state is pickled with: plain arrays, under the names of NumPy 1 and 2."""
    make = np.ndarray((0,)).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((make, name) for name in names), np.ndarray, np.dtype, np.dtypes.UInt32DType]


def refuse_code(files: Iterable[Path]) -> None:
    """UserError that names the first of verl's files that holds more than tensors and plain values."""
    for file in files:
        try:
            load_part(file)
        except UserError as error:
            raise UserError(
                "a file of the checkpoint cannot be used, and verl would run whatever is in it",
                where=str(file),
                why=error.why,
                fix="copy the checkpoint again from where it was made, or resume from another one "
                "(trainer.resume_mode=resume_path)",
            ) from error


@dataclass(frozen=True)
class Rank:
    """One rank's tensors and, if QaRL's engine wrote it, the record of their checksums."""

    file: Path
    tensors: Mapping[str, torch.Tensor]
    record: Mapping[str, str]

    @classmethod
    def open(cls, file: Path) -> Rank:
        try:
            tensors = load_part(file)
            if wrong := [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]:
                raise UserError(f"{file.name} cannot be used", where=str(file), why=f"holds no tensor {wrong[0]}")
        except UserError as error:
            raise UserError(
                "the weights of a rank cannot be read",
                where=str(file),
                why=f"{file.name} {error.why}",
                fix="copy the file again, or export another step",
            ) from error
        record = file.with_name(file.name.replace("model_", "qarl_state_", 1)).with_suffix(".json")
        return cls(file, tensors, _read_record(record))

    def part(self, name: str) -> torch.Tensor:
        """This rank's part of a tensor. UserError if it is not what was saved."""
        tensor = self.tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        saved = self.record.get(f"model.{name}")
        if self.record and (saved is None or saved.lower() != f"{checksums([local])[0] & (2**64 - 1):016x}"):
            raise UserError(
                f"{name} is not what was saved",
                where=str(self.file),
                why="its checksum is not the one recorded when the checkpoint was written",
                fix="export another step",
            )
        return local


def _read_record(file: Path) -> Mapping[str, str]:
    """Checksums by name; none, and a note, if there is no record."""
    if not file.is_file():
        print(f"note: there is no {file}: the weights of this rank are read unchecked", file=sys.stderr)
        return {}
    why = "it is not a table of checksums by name"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(record, dict) and all(isinstance(value, str) for value in record.values()):
            return record
    except (OSError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise UserError(
        "the checksums of a rank cannot be read",
        where=str(file),
        why=why,
        fix="export another step; without the file the weights are read unchecked",
    )


@dataclass(frozen=True)
class VerlWeights:
    """The ranks that hold different parts of the weights."""

    folder: Path
    ranks: list[Rank]

    @classmethod
    def open(cls, folder: Path) -> VerlWeights:
        """Map the files of `folder` (`global_step_N/actor`). UserError if they are not a whole FSDP checkpoint."""
        files = {int(match[2]): file for file in folder.glob("*.pt") if (match := _SHARD.fullmatch(file.name))}
        if 0 not in files:
            raise UserError("the checkpoint holds no weights", where=str(folder), why="there is no file of rank 0")
        first = Rank.open(files[0])
        sharded = (tensor for tensor in first.tensors.values() if isinstance(tensor, DTensor))
        parts = next((tensor.device_mesh.shape[-1] for tensor in sharded), 1)
        if missing := [rank for rank in range(parts) if rank not in files]:
            raise UserError(f"the checkpoint lacks the weights of rank {missing[0]}", where=str(folder))
        return cls(folder, [first, *(Rank.open(files[rank]) for rank in range(1, parts))])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors."""
        return {name: tuple(tensor.shape) for name, tensor in self.ranks[0].tensors.items()}

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, floating-point ones cast to `dtype` (None: as they are stored); checked as they are read."""
        for name, first in self.ranks[0].tensors.items():
            tensor = self._whole(name, first)
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def _whole(self, name: str, first: torch.Tensor) -> torch.Tensor:
        if not isinstance(first, DTensor):
            return self.ranks[0].part(name)
        placement = first.placements[-1]
        if any(not place.is_replicate() for place in first.placements[:-1]):
            raise UserError(f"{name} is sharded in more than one way", where=str(self.folder), why=_WHY)
        if not isinstance(placement, Shard):
            return self.ranks[0].part(name)
        whole = torch.cat([rank.part(name) for rank in self.ranks], dim=placement.dim)
        if whole.shape != first.shape:
            raise UserError(
                f"the parts of {name} make {list(whole.shape)}, and the tensor is {list(first.shape)}",
                where=str(self.folder),
                why="files of different runs are mixed",
            )
        return whole
