"""Checkpoints and exports of a run. A folder appears on disk only when it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl.lazy import exporter

if TYPE_CHECKING:
    from qarl.checkpoint.compressed_tensors import ModelFiles, write_model
    from qarl.checkpoint.folder import Checkpoint, CheckpointError, list_checkpoints, open_checkpoint, save_checkpoint
    from qarl.checkpoint.storage import StorageError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelFiles",
    "StorageError",
    "list_checkpoints",
    "open_checkpoint",
    "save_checkpoint",
    "write_model",
]

__getattr__ = exporter(
    __name__,
    {
        "compressed_tensors": ("ModelFiles", "write_model"),
        "folder": ("Checkpoint", "CheckpointError", "list_checkpoints", "open_checkpoint", "save_checkpoint"),
        "storage": ("StorageError",),
    },
)
