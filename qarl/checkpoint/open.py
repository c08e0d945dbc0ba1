"""Read a checkpoint of a local or verl run as a stream of BF16 weights or FP32 masters, for `qarl.export`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from qarl.checkpoint.compressed_tensors import model_of, read_tensors, tensor_shapes
from qarl.checkpoint.folder import Checkpoint, damaged, list_checkpoints, open_checkpoint
from qarl.checkpoint.verl_shards import CONFIG_FOLDER, VerlWeights, step_of, whole_and_torn
from qarl.console import note
from qarl.errors import UserError
from qarl.quant.convert import tied_names
from qarl.quant.expert_names import unstacked, unstacked_shapes

Stream = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """One checkpoint: its step and folder, the run's config, and the model's names, shapes and tensors.

    `model_folder`: has config.json and the tokenizer. `bf16`: yields the weights that the forward used. `fp32`: yields
    the masters, and other tensors upcast. It raises UserError if the run has no FP32 masters.
    """

    step: int
    folder: Path
    config: Mapping[str, Any]
    model_folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    bf16: Callable[[], Stream]
    fp32: Callable[[], Stream]


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint of `step` in the run folder `run`. If `step` is None, use the latest.

    Raise UserError if it does not exist or is incomplete. The message lists the existing steps or the missing files.
    """
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}", fix="give the folder of a run: run=OUTPUT_DIR/NAME")
    checkpoints = run / "checkpoints"
    found, torn = dict(list_checkpoints(checkpoints)), dict[int, str]()
    if not found:
        found, torn = whole_and_torn(checkpoints)
    wanted = max(torn, default=0) if step is None and not found else step
    if wanted in torn:
        raise UserError(
            f"the checkpoint of step {wanted} is incomplete",
            where=str(checkpoints / f"global_step_{wanted}"),
            why=torn[wanted],
            fix="run qarl export on a machine that has the files of all ranks, or choose a different step",
        )
    step_of_run = re.fullmatch(r"(?:global_)?step_(\d+)", run.name)
    if not found and step_of_run and run.parent.name == "checkpoints":
        fix = f"give the run and the step: run={run.parents[1]} step={step_of_run[1]}"
        raise UserError(f"{run} is a checkpoint, not a run", fix=fix)
    if not found:
        raise UserError(
            f"the run {run} has no checkpoints",
            why="it ended before the first was due (trainer.save_freq, trainer.save_minutes)",
            fix="train with trainer.save_freq=N, or use the final model in the export folder of the run",
        )
    chosen = max(found) if step is None else step
    if step is None and max(torn, default=0) > chosen:
        newest = max(torn)
        note(f"the checkpoint of step {newest} is incomplete: {torn[newest]}; step {chosen} is used instead")
    if chosen not in found:
        there = ", ".join(f"step={step}" for step in sorted(found))
        raise UserError(f"the run {run} has no checkpoint of step {chosen}", fix=f"choose from {there}")
    return found[chosen]


def open_source(folder: Path, *, trust_remote_code: bool = False) -> Source:
    """Open the checkpoint in `folder`, and raise UserError if it is damaged or its files cannot be read.

    The digests of a local checkpoint are checked now. The tensors of a verl checkpoint are checked when they are read.
    """
    with reading(folder):
        return _verl(folder, trust_remote_code) if (folder / "actor").is_dir() else _local(folder)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors in the `with` block into a UserError that names the checkpoint's `folder`.

    Many exception classes are caught, because libraries raise different ones for damaged files.
    """
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        fix = "check the disk it is on, or export a different step"
        if "trust_remote_code" in str(error):
            fix = "read the code in the model's folder, then add trust_remote_code=true"
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise UserError("the checkpoint cannot be read", where=str(folder), why=why, fix=fix) from error


def _local(folder: Path) -> Source:
    checkpoint = open_checkpoint(folder)
    return Source(
        checkpoint.step,
        folder,
        checkpoint.config,
        folder,
        tensor_shapes(folder),
        partial(read_tensors, folder),
        partial(_masters, checkpoint),
    )


def _masters(checkpoint: Checkpoint) -> Stream:
    """Return the stream of FP32 masters. Tensors without a master (frozen parameters, buffers) are upcast."""
    masters = dict(unstacked(checkpoint.optimizer(mmap=True)["masters"].items()))
    for name, shape in tensor_shapes(checkpoint.folder).items():
        if name in masters and tuple(masters[name].shape) != shape:
            raise damaged(checkpoint.folder, f"the master of {name} does not have the shape of its weight")
    if not masters:
        raise UserError(
            "the checkpoint has no FP32 masters",
            where=str(checkpoint.folder),
            why=f"the run has optim.master_dtype={checkpoint.config['optim']['master_dtype']}",
            fix="use format=bf16, because the BF16 weights are the masters",
        )
    return ((name, _fp32(masters.get(name, tensor))) for name, tensor in read_tensors(checkpoint.folder))


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def read_config(path: Path) -> Mapping[str, Any]:
    """Read the config that a run wrote. Raise UserError if the file is not such a config."""
    why = "it has no section quant"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(config, dict) and isinstance(config.get("quant"), dict):
            return config
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise UserError(
        "the run's config cannot be read", where=str(path), why=why, fix="restore config.yaml in the run folder"
    )


def _verl(folder: Path, trust_remote_code: bool) -> Source:
    """Open a checkpoint of verl, which has only FP32 masters. `bf16` casts them to BF16, as verl's forward does."""
    weights = VerlWeights.open(folder / "actor")
    model_folder = folder / "actor" / CONFIG_FOLDER
    tied = tied_names(model_of(model_folder, trust_remote_code=trust_remote_code))
    config = read_config(folder.parents[1] / "config.yaml")

    def stream(dtype: torch.dtype) -> Stream:
        return unstacked((name, tensor) for name, tensor in weights.tensors(dtype) if name not in tied)

    shapes = unstacked_shapes({name: shape for name, shape in weights.shapes().items() if name not in tied})
    bf16, fp32 = partial(stream, torch.bfloat16), partial(stream, torch.float32)
    return Source(step_of(folder), folder, config, model_folder, shapes, bf16, fp32)
