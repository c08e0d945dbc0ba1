"""Write JSON files atomically, and convert values that JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import write_text


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. Raise StorageError if the disk refuses to write it."""
    write_text(Path(path), json.dumps(json_safe(content), indent=2, allow_nan=False) + "\n")


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
