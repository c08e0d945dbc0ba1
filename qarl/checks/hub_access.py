"""Asks the Hugging Face Hub once whether it can be reached. If it cannot, only the local cache of the Hub is used.

Without a network, huggingface_hub tries a request six times, with pauses of 1, 2, 4, 8 and 8 seconds, before it uses
its cache (`http_backoff` in version 1.33). It does this for every name. Here one request decides for the whole process.

Importing this module imports neither transformers nor huggingface_hub.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

SECONDS = 3.0
"""Time limit for the Hub's answer in seconds. A name lookup has the limit of the machine's resolver instead."""
CARRIED = Path(__file__).resolve().parents[1] / "bench" / "models"
"""Folder with the config of some public models, NAME/config.json. The benchmarks read layer shapes from these files."""
_SAME_SIZES = {
    "Qwen/Qwen3-8B-Base": ("Qwen3-8B", {"max_position_embeddings": 32768, "eos_token_id": 151643}),
    "Qwen/Qwen3-30B-A3B-Base": ("Qwen3-30B-A3B", {"max_position_embeddings": 32768, "eos_token_id": 151643}),
}
"""Models without a folder in `CARRIED`: name -> (folder of a similar model, the config keys that differ)."""


@functools.cache
def why_unreachable() -> str | None:
    """Return why this machine cannot reach the Hub, or None if the Hub answers. The request is made once per process.

    If HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, no request is made. Proxies and HF_ENDPOINT are respected.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # the HTTP library, its proxies and TLS raise different types
        return f"{constants.ENDPOINT}: {type(error).__name__}: {error}"
    return None


def loading_options(path: str) -> dict[str, Any]:
    """Return keyword arguments for `from_pretrained(path)`. If the Hub cannot be reached, they allow only the cache."""
    if Path(path).is_dir() or not why_unreachable():
        return {}
    return {"local_files_only": True}


def carried_config(path: str) -> tuple[str, dict[str, Any]] | None:
    """Return this package's copy of the config of the Hub model `path` as (name, mapping), or None without a copy."""
    owner, _, name = path.partition("/")
    carried, changes = _SAME_SIZES.get(path, (name, {}))
    file = CARRIED / carried / "config.json"
    if owner not in ("Qwen", "HuggingFaceTB") or os.sep in name or not name or not file.is_file():
        return None
    return carried, json.loads(file.read_text(encoding="utf-8")) | changes
