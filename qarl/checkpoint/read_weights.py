"""Read a checkpoint of either backend as a stream of BF16 weights or FP32 masters, for `qarl export`.

`qarl.checkpoint.resumable` describes a local run's checkpoint. verl's FSDP engine writes
`global_step_N/actor/model_world_size_W_rank_R.pt`: a state dict of DTensors, each with rank R's part of an FP32 master
(verl/utils/checkpoint/fsdp_checkpoint_manager.py, 0.9.1). verl's own `model_merger` needs memory for the whole model
and rounds to BF16. Here the files are memory-mapped, and one tensor at a time is assembled in FP32, without verl, Ray
or a process group. It is compared with the checksums that QaRL's engine writes beside the files.

verl unpickles these files without restrictions, which could run code. So `refuse_code` checks them before verl does.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, Shard

from qarl.checkpoint.model_files import model_of, read_tensors
from qarl.checkpoint.resumable import (
    STATE_FILE,
    Checkpoint,
    list_checkpoints,
    load_dict,
    open_checkpoint,
)
from qarl.console import note
from qarl.errors import UserError
from qarl.quant.convert import tied_names
from qarl.quant.experts import unstacked
from qarl.rollout.publish.checksum import checksums

Stream = Iterator[tuple[str, torch.Tensor]]
CONFIG_FOLDER = "huggingface"
BASE_FILE = "qarl_base.json"
"""In `actor/`, if adapters were trained: the digests of the tensors of their base."""
_FOLDER = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


@dataclass(frozen=True)
class Source:
    """One checkpoint: its step, the run's config, and the model's tensors.

    `model_folder`: has config.json and the tokenizer. `tensors`: yields for torch.bfloat16 the weights that the forward
    used, and for torch.float32 the masters, and other tensors upcast. It raises UserError if the run has no masters.
    """

    step: int
    config: Mapping[str, Any]
    model_folder: Path
    tensors: Callable[[torch.dtype], Stream]


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint of `step` in the run folder `run`. If `step` is None, use the latest.

    Raise UserError if it does not exist or is incomplete. The message lists the existing steps or the missing files.
    """
    if not run.is_dir():
        what = f"{run} is a file" if run.exists() else f"there is no folder {run}"
        raise UserError(what, where=f"run={run}", fix="give the folder of a run, such as runs/NAME")
    checkpoints = run / "checkpoints"
    folders = dict(list_checkpoints(checkpoints))
    torn = dict[int, str]()
    if not folders:
        folders, torn = whole_and_torn(checkpoints)
    wanted = step if step is not None else max(folders or torn, default=0)
    if wanted in torn:
        raise UserError(
            f"the checkpoint of step {wanted} is incomplete",
            where=str(checkpoints / f"global_step_{wanted}"),
            why=torn[wanted],
            fix="run qarl export on a machine that has the files of all ranks, or choose a different step",
        )
    if step is None and max(torn, default=0) > wanted:
        newest = max(torn)
        note(
            f"the checkpoint of step {newest} is incomplete: {torn[newest]}; step {wanted} is used instead"
        )
    if wanted not in folders:
        steps = ", ".join(f"step={step}" for step in sorted(folders))
        what = (
            f"the run {run} has no checkpoint of step {wanted}"
            if steps
            else f"the run {run} has no checkpoints"
        )
        other = (
            "train with trainer.save_freq=N, or use the final model in the export folder of the run"
        )
        raise UserError(what, fix=f"choose from {steps}" if steps else other)
    return folders[wanted]


def model_of_run(folder: Path) -> str | None:
    """Return `model.path` of the run whose checkpoint is in `folder`, or None if no config says it. The files are not
    compared with digests."""
    try:
        if (state := folder / STATE_FILE).is_file():
            config = json.loads(state.read_text(encoding="utf-8"))["config"]
        else:
            file = folder.absolute().parents[1] / "config.yaml"
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
        return str(config["model"]["path"])
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return None


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors in the `with` block into a UserError that names the checkpoint's `folder`.

    Many exception classes are caught, because libraries raise different ones for damaged files.
    """
    try:
        yield
    except (
        OSError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        fix = "check the disk it is on, or export a different step"
        if "trust_remote_code" in str(error):
            fix = "read the code in the model's folder, then add trust_remote_code=true"
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise UserError(
            "the checkpoint cannot be read", where=str(folder), why=why, fix=fix
        ) from error


def read_all(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors`. Raise UserError if one cannot be read."""
    with reading(folder):
        yield from tensors


def open_source(folder: Path, *, trust_remote_code: bool = False) -> Source:
    """Open the checkpoint in `folder`, and raise UserError if it is damaged.

    The digests of a local checkpoint are checked now. The tensors of a verl checkpoint are checked when they are read.
    """
    return _verl(folder, trust_remote_code) if (folder / "actor").is_dir() else _local(folder)


def _local(folder: Path) -> Source:
    checkpoint = open_checkpoint(folder)

    def stream(dtype: torch.dtype) -> Stream:
        return read_tensors(folder) if dtype == torch.bfloat16 else _masters(checkpoint)

    return Source(checkpoint.step, checkpoint.config, folder, stream)


def _masters(checkpoint: Checkpoint) -> Stream:
    """Return the stream of FP32 masters. Tensors without a master (frozen parameters, buffers) are upcast."""
    masters = dict(unstacked(checkpoint.optimizer(mmap=True)["masters"].items()))
    if not masters:
        raise UserError(
            "the checkpoint has no FP32 masters",
            where=str(checkpoint.folder),
            why=f"the run has optim.master_dtype={checkpoint.config['optim']['master_dtype']}",
            fix="use format=bf16, because the BF16 weights are the masters",
        )
    return (
        (name, _fp32(masters.get(name, tensor))) for name, tensor in read_tensors(checkpoint.folder)
    )


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _verl(folder: Path, trust_remote_code: bool) -> Source:
    """Open a checkpoint of verl, which has only FP32 masters. For BF16 they are cast, as in verl's forward."""
    ranks = open_ranks(folder / "actor")
    model_folder = folder / "actor" / CONFIG_FOLDER
    tied = tied_names(model_of(model_folder, trust_remote_code=trust_remote_code))
    config = yaml.safe_load((folder.parents[1] / "config.yaml").read_text(encoding="utf-8"))

    def stream(dtype: torch.dtype) -> Stream:
        names = [name for name in ranks[0].tensors if name not in tied]
        whole = ((name, whole_tensor(ranks, name)) for name in names)
        return unstacked(
            (name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in whole
        )

    return Source(step_of(folder), config, model_folder, stream)


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
    shards = {
        file: match for file in folder.glob("actor/*.pt") if (match := _SHARD.fullmatch(file.name))
    }
    ranks = {int(match[2]) for match in shards.values()}
    ranks_of_run = [int(match[1]) for match in shards.values()]
    if not shards or len(ranks) != max(ranks_of_run):
        return "actor/ lacks the weights of at least one rank"
    torn = [file.name for file in shards if not zipfile.is_zipfile(file)]
    if not torn and _has_adapters(folder) and not (folder / "actor" / BASE_FILE).is_file():
        return f"actor/{BASE_FILE}, the digests of the adapter's base, is missing"
    return f"actor/{torn[0]} is cut short" if torn else None


def _has_adapters(folder: Path) -> bool:
    """Return whether the run of the checkpoint in `folder` trains adapters. Without the run's config, return False."""
    try:
        config = yaml.safe_load(
            (folder.absolute().parents[1] / "config.yaml").read_text(encoding="utf-8")
        )
        return bool(config["lora"]["r"])
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return False


def whole_and_torn(checkpoints: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """Return two dicts by step: the folders of complete checkpoints, and what is missing in incomplete ones."""
    folders = {
        step: folder for folder in checkpoints.glob("global_step_*") if (step := step_of(folder))
    }
    torn = {
        step: problem for step, folder in folders.items() if (problem := what_is_missing(folder))
    }
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
                fix="copy the checkpoint again, or resume from a different one (trainer.resume_mode=resume_path)",
            ) from error


@dataclass(frozen=True)
class Rank:
    """One rank's tensors and their checksums. There are no checksums if QaRL's engine did not write them."""

    file: Path
    tensors: Mapping[str, torch.Tensor]
    record: Mapping[str, str]

    @classmethod
    def open(cls, file: Path) -> Rank:
        record = file.with_name(file.name.replace("model_", "qarl_state_", 1)).with_suffix(".json")
        if not record.is_file():
            note(f"there is no {record}, so the weights of this rank are read unchecked")
            return cls(file, load_part(file), {})
        return cls(file, load_part(file), json.loads(record.read_text(encoding="utf-8")))

    def part(self, name: str) -> torch.Tensor:
        """Return this rank's part of a tensor. Raise UserError if it differs from its checksum."""
        tensor = self.tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        saved = self.record.get(f"model.{name}")
        if self.record and (
            saved is None or saved != f"{checksums([local])[0] & (2**64 - 1):016x}"
        ):
            raise UserError(
                f"{name} differs from what was saved",
                where=str(self.file),
                why="its checksum is not the one recorded when the checkpoint was written",
                fix="export a different step",
            )
        return local


def open_ranks(folder: Path) -> list[Rank]:
    """Memory-map the files of `folder` (`global_step_N/actor`). Raise UserError if the checkpoint is incomplete."""
    files = {
        int(match[2]): file
        for file in folder.glob("*.pt")
        if (match := _SHARD.fullmatch(file.name))
    }
    first = Rank.open(files[0])
    sharded = (tensor for tensor in first.tensors.values() if isinstance(tensor, DTensor))
    parts = next((tensor.device_mesh.shape[-1] for tensor in sharded), 1)
    if missing := [rank for rank in range(parts) if rank not in files]:
        raise UserError(f"the checkpoint lacks the weights of rank {missing[0]}", where=str(folder))
    others = [Rank.open(files[rank]) for rank in range(1, parts)]
    return [first, *others]


def whole_tensor(ranks: list[Rank], name: str) -> torch.Tensor:
    """Return the whole tensor, assembled from the ranks and checked."""
    first = ranks[0].tensors[name]
    if not isinstance(first, DTensor) or not isinstance(placement := first.placements[-1], Shard):
        return ranks[0].part(name)
    parts = [rank.part(name) for rank in ranks]
    whole = torch.cat(parts, dim=placement.dim)
    if whole.shape != first.shape or any(
        not place.is_replicate() for place in first.placements[:-1]
    ):
        raise UserError(
            f"the parts of {name} have the shape {list(whole.shape)} together, not {list(first.shape)}",
            where=str(ranks[0].file.parent),
            why="files of different runs are mixed, or the trainer was tensor-parallel, which is not supported",
        )
    return whole
