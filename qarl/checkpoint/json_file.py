"""Write JSON files atomically, append to files of JSON lines, and convert values that JSON does not have."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import write_text, writing


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. Raise StorageError if the disk refuses to write it."""
    write_text(Path(path), json.dumps(json_safe(content), indent=2, allow_nan=False) + "\n")


def append_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each entry. Raise StorageError if the disk refuses to write them.

    If a crash or a full disk has cut off the last line, the next one begins on a new line."""
    text = "".join(json.dumps(json_safe(one), allow_nan=False) + "\n" for one in entries)
    with writing(path), path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())


def json_safe(value: Any) -> Any:
    """Convert `value` to JSON types: paths and non-finite floats to text, torch's and NumPy's scalars to numbers."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    value = number(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> float:
    return value.item() if hasattr(value, "item") else value
