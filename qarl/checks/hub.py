"""The Hugging Face Hub: whether it can be reached, decided once by a single request, and what its cache holds.

huggingface_hub asks six times with pauses of 1, 2, 4, 8 and 8 seconds before it gives up (`http_backoff` in version
1.33), and only then looks into its cache. On a machine without network, as compute nodes are, each name costs that
time. One request without repetition decides instead; without an answer only the cache is asked.

Importing this module imports neither transformers nor huggingface_hub.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import Any

SECONDS = 3.0
"""How long the Hub has to answer; a name server that does not answer counts too."""
CARRIED = Path(__file__).resolve().parents[1] / "bench" / "models"
"""NAME/config.json of public models, which the benchmarks take their shapes from."""
_SAME_SIZES = {
    "Qwen/Qwen3-8B-Base": ("Qwen3-8B", {"max_position_embeddings": 32768, "eos_token_id": 151643}),
    "Qwen/Qwen3-30B-A3B-Base": ("Qwen3-30B-A3B", {"max_position_embeddings": 32768, "eos_token_id": 151643}),
}
"""Models whose config differs from a carried one in these numbers alone."""


@functools.cache
def why_unreachable() -> str | None:
    """Why the Hub cannot be asked from this machine, or None if it answers. Asked once a process.

    HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE are believed without asking; proxies and HF_ENDPOINT are used as
    huggingface_hub uses them.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answer = [f"{constants.ENDPOINT} did not answer within {SECONDS:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception as error:  # of the HTTP library, of its proxies, of TLS
            answer[0] = f"{constants.ENDPOINT}: {type(error).__name__}: {error}"
        else:
            answer.clear()

    # A thread, because no timeout of the HTTP library covers the name server.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return "; ".join(answer) or None


def loading_options(path: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `path`: its cache alone is used if the Hub cannot be reached."""
    if Path(path).is_dir() or not why_unreachable():
        return {}
    return {"local_files_only": True}


def carried_config(path: str) -> tuple[str, dict[str, Any]] | None:
    """The public config of the model `path` that comes with this package, as (name, mapping); None for other models."""
    owner, _, name = path.partition("/")
    carried, changes = _SAME_SIZES.get(path, (name, {}))
    file = CARRIED / carried / "config.json"
    if owner not in ("Qwen", "HuggingFaceTB") or os.sep in name or not name or not file.is_file():
        return None
    return carried, json.loads(file.read_text(encoding="utf-8")) | changes
