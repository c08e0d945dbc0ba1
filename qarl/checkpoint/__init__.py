"""Checkpoints and exports of a run. A folder appears on disk only when it is complete."""

from __future__ import annotations

from qarl.lazy import exporter

__getattr__ = exporter(
    __name__,
    {
        "compressed_tensors": ("ModelFiles", "write_model"),
        "folder": ("Checkpoint", "CheckpointError", "list_checkpoints", "open_checkpoint", "save_checkpoint"),
        "storage": ("StorageError",),
    },
)
