"""A model whose GGUF file comes in a Python package, and data of a source of problems, for a demo.

Both go to the folders that the demo's config names. What is there and was made of the same is left alone.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.config.demos import PackagedModel
from qarl.console import say
from qarl.convert_gguf.convert import RECORD, ConversionRequest, convert, digest
from qarl.errors import UserError
from qarl.side_packages import require
from qarl.sources.__main__ import write as write_data
from qarl.sources.files import RECORD as DATA_RECORD


def make_missing(source: PackagedModel, config: Config, command: str) -> None:
    """Make the model and the data of `config`. Raise UserError if a package is missing, or a folder has other files.

    command: the command that needs them, for an error."""
    require("gguf", source.package, source.problems[0], needed_for=command, then=command)
    make_model(gguf_file(source.package), Path(config.model.path))
    make_data(source.problems, Path(config.data.train_files[0]).parent)


def gguf_file(package: str) -> Path:
    """Return the GGUF file of an installed package, without importing it: its own import needs llama.cpp."""
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path(package)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            f"the package {package} holds {len(files)} GGUF files",
            where=str(folder),
            why="QaRL knows the release with one",
            fix="install the release that requirements/smollm2.lock names",
        )
    return files[0]


def make_model(file: Path, folder: Path) -> None:
    """Convert `file` to `folder`, unless that was done."""
    if recorded(folder / RECORD).get("sha256") == digest(file):
        say(f"{folder} is up to date")
        return
    print(convert(ConversionRequest(file, folder)))


def make_data(problems: Sequence[str], folder: Path) -> None:
    """Write the data with `qarl data`, unless that was done with the same arguments."""
    arguments = [*problems, f"out={folder}"]
    if recorded(folder / DATA_RECORD).get("command") == ["qarl", "data", *arguments]:
        say(f"{folder} is up to date")
        return
    write_data(arguments)


def recorded(file: Path) -> dict[str, Any]:
    """Return what a folder's record says, or nothing if it has none that can be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
