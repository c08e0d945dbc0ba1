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
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from qarl.checkpoint.best_step import CheckpointStep, best_step
from qarl.checkpoint.model_files import model_of, read_tensors
from qarl.checkpoint.resumable import (
    STATE_FILE,
    Checkpoint,
    list_checkpoints,
    load_dict,
    open_checkpoint,
)
from qarl.checkpoint.storage import checkpoints_dir
from qarl.checkpoint.trl_folder import refuse_trl
from qarl.console import note
from qarl.errors import UserError
from qarl.quant.convert import tied_names
from qarl.quant.experts import unstacked
from qarl.rollout.publish.checksum import checksums

Stream = Iterator[tuple[str, Tensor]]
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


def find_checkpoint(run: Path, step: CheckpointStep | None) -> Path:
    """Return the folder of the checkpoint of `step` in the run folder `run`. If `step` is None, use the latest.

    Raise UserError if it does not exist or is incomplete. The message lists the existing steps or the missing files.
    """
    if not run.is_dir():
        what = f"{run} is a file" if run.exists() else f"there is no folder {run}"
        raise UserError(what, where=f"run={run}", fix="give the folder of a run, such as runs/NAME")
    refuse_part_of_run(run, f"run={run}")
    if step == "best":
        step = best_step(run)
    checkpoints = run / "checkpoints"
    folders = dict(list_checkpoints(checkpoints))
    torn: dict[int, str] = {}
    if not folders:
        folders, torn = whole_and_torn(checkpoints)
    chosen = step if step is not None else max(folders or torn, default=0)
    if chosen in torn:
        raise UserError(
            f"the checkpoint of step {chosen} is incomplete",
            where=str(checkpoints / f"global_step_{chosen}"),
            why=torn[chosen],
            fix="run qarl export on a machine that has the files of all ranks, or choose a different step",
        )
    if step is None and max(torn, default=0) > chosen:
        newest = max(torn)
        note(
            f"the checkpoint of step {newest} is incomplete: {torn[newest]}; step {chosen} is used instead"
        )
    if chosen in folders:
        return folders[chosen]
    if not folders:
        refuse_trl(
            run,
            f"run={run}",
            "call trainer.save_quantized(FOLDER) in the script, after train(resume_from_checkpoint={newest!s})",
        )
        fix = (
            "train with trainer.save_freq=N, or use the final model in the export folder of the run"
        )
        raise UserError(f"the run {run} has no checkpoints", fix=fix)
    steps = ", ".join(f"step={step}" for step in sorted(folders))
    what = f"the run {run} has no checkpoint of step {chosen}"
    raise UserError(what, fix=f"choose from {steps}")


def newest_checkpoint(run: Path) -> tuple[int, Path] | None:
    """Return step and folder of the newest complete checkpoint of `run`, of either backend, or None if it has none.
    Its bytes are not checked."""
    found = dict(list_checkpoints(checkpoints_dir(run)))
    found = found or dict(whole_and_torn(checkpoints_dir(run))[0])
    return max(found.items(), default=None)


def refuse_part_of_run(folder: Path, where: str, key: str = "run=") -> None:
    """Raise UserError if `folder` is a checkpoint, or the folder of a run's checkpoints.

    `where`: the argument that names it. `key`: what stands before the folder of a run there."""
    target = folder.absolute()
    parent = target if target.name == "checkpoints" else target.parent
    found = dict(list_checkpoints(parent)) or whole_and_torn(parent)[0]
    steps = [step for step, path in found.items() if path == target or parent == target]
    if parent.name != "checkpoints" or not steps:
        return
    given = folder if folder.name else target
    run = given.parent if parent == target else given.parent.parent
    raise UserError(
        f"{folder} is in the folder of a run, and is not a run",
        where=where,
        fix=f"write {key}{run} step={max(steps)}",
    )


def model_of_run(folder: Path) -> str | None:
    """Return `model.path` of the run whose checkpoint is in `folder`, or None if no config says it. The files are not
    compared with digests."""
    try:
        state = folder / STATE_FILE
        if state.is_file():
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


def read_all(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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

    def stream() -> Stream:
        for name, tensor in read_tensors(checkpoint.folder):
            yield name, _cast(masters.get(name, tensor), torch.float32)

    return stream()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in `dtype`, and any other unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _verl(folder: Path, trust_remote_code: bool) -> Source:
    """Open a checkpoint of verl, which has only FP32 masters. For BF16 they are cast, as in verl's forward."""
    ranks = open_ranks(folder / "actor")
    model_folder = folder / "actor" / CONFIG_FOLDER
    tied = tied_names(model_of(model_folder, trust_remote_code=trust_remote_code))
    config = yaml.safe_load((folder.parents[1] / "config.yaml").read_text(encoding="utf-8"))

    def stream(dtype: torch.dtype) -> Stream:
        names = [name for name in ranks[0].tensors if name not in tied]
        whole = ((name, whole_tensor(ranks, name)) for name in names)
        return unstacked((name, _cast(tensor, dtype)) for name, tensor in whole)

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
    shards = _shards(folder / "actor")
    ranks = {shard.rank for shard in shards}
    if not shards or len(ranks) != max(shard.world_size for shard in shards):
        return "actor/ lacks the weights of at least one rank"
    torn = [shard.file.name for shard in shards if not zipfile.is_zipfile(shard.file)]
    if not torn and _has_adapters(folder) and not (folder / "actor" / BASE_FILE).is_file():
        return f"actor/{BASE_FILE}, the digests of the adapter's base, is missing"
    return f"actor/{torn[0]} is cut short" if torn else None


@dataclass(frozen=True)
class _Shard:
    """A file of verl with the tensors of one rank of `world_size`."""

    file: Path
    world_size: int
    rank: int


def _shards(folder: Path) -> list[_Shard]:
    shards = []
    for file in folder.glob("*.pt"):
        match = _SHARD.fullmatch(file.name)
        if match:
            shards.append(_Shard(file, world_size=int(match[1]), rank=int(match[2])))
    return shards


def _has_adapters(folder: Path) -> bool:
    """Return whether the run of the checkpoint in `folder` trains adapters. Without the run's config, return False."""
    try:
        file = folder.absolute().parents[1] / "config.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        return bool(config["lora"]["r"])
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return False


def whole_and_torn(checkpoints: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """Return two dicts by step: the folders of complete checkpoints, and what is missing in incomplete ones."""
    folders = {}
    torn = {}
    for folder in checkpoints.glob("global_step_*"):
        step = step_of(folder)
        if not step:
            continue
        problem = what_is_missing(folder)
        if problem:
            torn[step] = problem
        else:
            folders[step] = folder
    return folders, torn


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
    reconstruct = np.ndarray((0,)).__reduce__()[0]
    in_numpy_1 = (reconstruct, "numpy.core.multiarray._reconstruct")
    in_numpy_2 = (reconstruct, "numpy._core.multiarray._reconstruct")
    return [in_numpy_1, in_numpy_2, np.ndarray, np.dtype, np.dtypes.UInt32DType]


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
    tensors: Mapping[str, Tensor]
    record: Mapping[str, str]

    @classmethod
    def open(cls, file: Path) -> Rank:
        record = file.with_name(file.name.replace("model_", "qarl_state_", 1)).with_suffix(".json")
        if not record.is_file():
            note(f"there is no {record}, so the weights of this rank are read unchecked")
            return cls(file, load_part(file), {})
        return cls(file, load_part(file), json.loads(record.read_text(encoding="utf-8")))

    def part(self, name: str) -> Tensor:
        """Return this rank's part of a tensor. Raise UserError if it differs from its checksum."""
        tensor = self.tensors[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if self.record and self.record.get(f"model.{name}") != _as_recorded(local):
            raise UserError(
                f"{name} differs from what was saved",
                where=str(self.file),
                why="its checksum is not the one recorded when the checkpoint was written",
                fix="export a different step",
            )
        return local


def _as_recorded(tensor: Tensor) -> str:
    """Return the checksum of a tensor as QaRL's engine records it: 64 bits in hexadecimal digits."""
    (checksum,) = checksums([tensor])
    return f"{checksum & (2**64 - 1):016x}"


def open_ranks(folder: Path) -> list[Rank]:
    """Memory-map the files of `folder` (`global_step_N/actor`). Raise UserError if the checkpoint is incomplete."""
    files = {shard.rank: shard.file for shard in _shards(folder)}
    first = Rank.open(files[0])
    sharded = (tensor for tensor in first.tensors.values() if isinstance(tensor, DTensor))
    parts = next((tensor.device_mesh.shape[-1] for tensor in sharded), 1)
    missing = [rank for rank in range(parts) if rank not in files]
    if missing:
        raise UserError(f"the checkpoint lacks the weights of rank {missing[0]}", where=str(folder))
    others = [Rank.open(files[rank]) for rank in range(1, parts)]
    return [first, *others]


def whole_tensor(ranks: list[Rank], name: str) -> Tensor:
    """Return the whole tensor, assembled from the ranks and checked."""
    first = ranks[0].tensors[name]
    if not isinstance(first, DTensor):
        return ranks[0].part(name)
    *outer, placement = first.placements
    if not isinstance(placement, Shard):
        return ranks[0].part(name)
    parts = [rank.part(name) for rank in ranks]
    whole = torch.cat(parts, dim=placement.dim)
    cut_once = all(axis.is_replicate() for axis in outer)
    if whole.shape != first.shape or not cut_once:
        raise UserError(
            f"the parts of {name} have the shape {list(whole.shape)} together, not {list(first.shape)}",
            where=str(ranks[0].file.parent),
            why="files of different runs are mixed, or the trainer was tensor-parallel, which is not supported",
        )
    return whole
