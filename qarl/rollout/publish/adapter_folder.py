"""The folder in which an adapter is handed to vLLM, which reads adapters only from folders in peft's format."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qarl.errors import UserError
from qarl.lora.adapter import Adapter, write_adapter

_SHARED_MEMORY = Path("/dev/shm")
SLACK = 2**20
"""Bytes of the other files of an adapter, and more."""


@contextmanager
def adapter_folder(adapter: Adapter) -> Iterator[Path]:
    """Return a context with a folder that has the files of `adapter`. Raise UserError if there is no room for them."""
    with tempfile.TemporaryDirectory(dir=_shared_memory(adapter.nbytes)) as name:
        folder = Path(name)
        _write(folder, adapter)
        yield folder


def _shared_memory(nbytes: int) -> Path | None:
    """Return the folder in shared memory if there is room in it. In a container it often has 64 MB."""
    room = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    return _SHARED_MEMORY if room > nbytes + SLACK else None


def _write(folder: Path, adapter: Adapter) -> None:
    try:
        write_adapter(folder, adapter)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the adapter of {adapter.nbytes / 1e6:.4g} MB could not be written for vLLM",
            where=str(folder.parent),
            why=str(error),
            fix="free some room there, or let TMPDIR name a folder with more",
        ) from error
