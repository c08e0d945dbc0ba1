"""The state of a checkpoint, with every key that state.json has: for tests of which only some are interesting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qarl.checkpoint.folder import STATE_FILE, _digest
from qarl.checkpoint.storage import file_sha256

CONFIG = {"seed": 0, "trainer": {}, "quant": {}, "optim": {}}


def whole_state(**changes: Any) -> dict[str, Any]:
    """What `save_checkpoint` takes as `state`, with `changes`."""
    state: dict[str, Any] = {
        "step": 3,
        "weight_version": 3,
        "config": CONFIG,
        "versions": {"python": "3"},
        "sampler": {"num_prompts": 4, "batch_size": 2, "seed": 0, "shuffle": True, "batches_drawn": 3},
        "train_prompts": "0" * 64,
        "weights": "0" * 64,
        "published": {"model.norm.weight": "0" * 64},
        "metrics": {"mismatch/k3": 1e-4},
    }
    return state | changes


def write_bare(folder: Path, **changes: Any) -> None:
    """A whole checkpoint whose files hold nothing to restore."""
    folder.mkdir(parents=True)
    for name in ("optimizer.pt", "rng.pt", "config.json"):
        (folder / name).write_text(name)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in folder.iterdir()}
    seal(folder, {"format": 1, **whole_state(**changes), "files": files})


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with its digest, as `save_checkpoint` and as somebody who changed it would."""
    (folder / STATE_FILE).write_text(json.dumps(state | {"digest": _digest(state)}))


def reseal(folder: Path, **changes: Any) -> None:
    """Change keys of state.json (`...` drops one), take the files as they are now, and seal it again."""
    state = json.loads((folder / STATE_FILE).read_text())
    del state["digest"]
    for name in state["files"]:
        path = folder / name
        state["files"][name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    seal(folder, {key: value for key, value in (state | changes).items() if value is not ...})
