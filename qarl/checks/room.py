"""Whether the disk has room for what a run leaves: its export and, if it saves, one checkpoint.

A run that finds no room at its end has trained for nothing. So this is checked before its weights are loaded, for the
free bytes of the disk, the number of files that it takes, and the largest file that the process may write
(`ulimit -f`). The checkpoints that a run
keeps beside the newest are the doctor's topic, since a run goes on without them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qarl.checkpoint.model_files import MAX_SHARD_BYTES
from qarl.checkpoint.storage import check_room
from qarl.checks.check import NotCheckedError, RunInputs
from qarl.checks.memory import checkpoint_bytes, largest_checkpoint_file
from qarl.checks.model_size import ModelSize
from qarl.config import Config

REPORT_BYTES = 2 * 2**20
"""Allowance for plots, report and the logs that do not grow with the steps."""
STEP_BYTES = 8 * 2**10
"""Allowance for the metrics and samples of one step."""
RUN_FILES = 100
"""Allowance for the number of files: two checkpoints while one replaces the other, the export, plots and logs are some
sixty, and a sharded model has more."""
HEADER_BYTES = 2**20
"""Allowance for the headers of a file of tensors."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")


@dataclass(frozen=True)
class RunBytes:
    """Bytes on the disk of the parts of a run: the export, one checkpoint, and the logs with plots and report. `files`:
    those of the largest file of export and checkpoint."""

    export: int
    checkpoint: int
    logs: int
    files: tuple[int, int]


def run_bytes(config: Config, size: ModelSize) -> RunBytes:
    """Return the bytes of the parts of the run of `config`, whose model has `size`."""
    text = _text_bytes(config.model.path)
    sizes = checkpoint_bytes(size, config)
    shard = min(sizes["export"], MAX_SHARD_BYTES)
    return RunBytes(
        sizes["export"] + text,
        sizes["resumable"] + text,
        REPORT_BYTES + STEP_BYTES * config.trainer.total_training_steps,
        (shard + HEADER_BYTES, largest_checkpoint_file(size, config) + HEADER_BYTES),
    )


def check_run_room(config: Config, inputs: RunInputs) -> None:
    """Raise StorageError if the run of `config` has no room. Nothing is checked if its model's config lacks a
    number."""
    with suppress(NotCheckedError):
        check_room_of_size(config, inputs.size)


def check_room_of_size(config: Config, size: ModelSize) -> None:
    """Raise StorageError if the run of `config` saves or exports, and there is no room for the export and one
    checkpoint. Nothing is checked if `save_contents` of verl says what a checkpoint has."""
    trainer = config.trainer
    saves = trainer.save_freq > 0 or trainer.save_minutes > 0 or trainer.save_best
    if config.backend == "verl":
        saves = saves or trainer.save_final  # the export is made from a checkpoint
    if any("save_contents" in key for key in config.verl):
        return
    check_room_of_files(config.run_dir, config, size, saves=saves, exports=trainer.save_final)


def check_room_of_files(
    folder: Path, config: Config, size: ModelSize, *, saves: bool, exports: bool
) -> None:
    """Raise StorageError if `folder` has no room for a checkpoint (`saves`) and an export (`exports`) of the model of
    `config`, beside the logs of the run. Without both nothing is checked."""
    if not saves and not exports:
        return
    needed = run_bytes(config, size)
    export_file, checkpoint_file = needed.files
    parts = {"logs": needed.logs}
    if exports:
        parts["export"] = needed.export
    if saves:
        parts["one checkpoint"] = needed.checkpoint
    holds = ", ".join(f"{name} {part:,}" for name, part in parts.items())
    check_room(
        folder,
        sum(parts.values()),
        largest_file=max(export_file if exports else 0, checkpoint_file if saves else 0),
        least_files=RUN_FILES,
        holds=f" ({holds})",
        fix=", or set output_dir to another disk",
    )


def _text_bytes(model: str) -> int:
    """Return the bytes of the tokenizer and the configs of a model's folder, which each export and checkpoint has."""
    folder = Path(model)
    files = folder.iterdir() if folder.is_dir() else ()
    return sum(
        file.stat().st_size for file in files if file.is_file() and file.suffix not in _WEIGHTS
    )
