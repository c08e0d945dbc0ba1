"""Finished runs in saved results of suites, so that a suite can be continued where its run folders are not.

A run is known again by a digest of its whole config without name and folder. A run that was saved before a config key
was added has another digest and is run again, because its value of that key is unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.errors import UserError


def config_digest(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits for a config, equal for equal values in any order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def saved_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return digest -> entry of every finished run in `ablate_*.json` of a folder, with its suite under `suite`.

    Raise UserError if such a file cannot be read."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("ablate_*.json")):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            whole = {"commit": results["commit"][:8]}  # of entries from before each had its own
            entries = [whole | entry | {"suite": results["suite"]} for entry in results["runs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                "saved results cannot be read",
                where=str(path),
                why=f"{type(error).__name__}: {error}",
                fix="restore the file, or leave out --reuse-saved",
            ) from error
        for entry in entries:
            digest = entry.get("config_digest")
            if digest and not entry["failed"] and entry["minutes"] >= found.get(digest, entry)["minutes"]:
                found[digest] = entry
    return found


def reused(saved: Mapping[str, Any], suite: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved entry as an entry of `suite`. `run`: its setting, arm and seed. Minutes of another suite count
    there, so they are 0 here."""
    minutes = saved["minutes"] if saved["suite"] == suite else 0.0
    figures = {key: value for key, value in saved.items() if key not in ("suite", "setting", "arm", "seed")}
    return {**run, **figures, "minutes": minutes}
