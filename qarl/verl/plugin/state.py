"""Checks verl's checkpoints: after loading, a rank must have the state that it had when it saved.

For each rank, verl writes shards of model and optimizer and the states of scheduler and random generators. It loads
them without checks. QaRL writes a small JSON beside them with a checksum of every tensor, and compares the live state
with it after a load. If a file was truncated or swapped, or a load left something out, the run ends with an error that
names the tensor instead of continuing from a wrong state. `checkpoint.save_contents` and `load_contents` may tell verl
not to save or load some parts. Those parts are neither recorded nor compared.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.open import load_part, refuse_code
from qarl.checkpoint.storage import write_json
from qarl.errors import UserError
from qarl.optim.muon import local_part
from qarl.rollout.publish.checksum import checksums

State = dict[str, str]


PARTS = ("model", "optimizer", "extra")
"""verl's names for the files of a rank. `extra` holds the scheduler's state and the random-number states."""


def engine_state(engine: Any, parts: Collection[str] = PARTS) -> State:
    """Return a checksum of every tensor in this rank's shards of model and optimizer, and of the scheduler's state."""
    tensors: dict[str, torch.Tensor] = {}
    state: State = {}
    if "model" in parts:
        tensors |= {f"model.{name}": tensor for name, tensor in engine.module.state_dict().items()}
    if "optimizer" in parts:
        optimizer = engine.optimizer.state_dict()
        for index, one in optimizer["state"].items():
            for name, value in one.items():
                tensors[f"optimizer.{index}.{name}"] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        groups = [{key: value for key, value in one.items() if key != "params"} for one in optimizer["param_groups"]]
        state["optimizer.param_groups"] = _digest(repr(groups).encode())
    if "extra" in parts:
        state["scheduler"] = _digest(repr(sorted(engine.lr_scheduler.state_dict().items(), key=str)).encode())
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    # With param_offload verl has only begun to copy them to the host (`non_blocking` in verl/utils/fsdp_utils.py).
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    sums = checksums(local.values())
    return state | {name: f"{value & (2**64 - 1):016x}" for name, value in zip(local, sums, strict=True)}


def random_state(rng: Any) -> State:
    """Return a digest of each state that `FSDPCheckpointManager.get_rng_state` returns."""
    found = {}
    for name, value in rng.items():
        data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else pickle.dumps(value, protocol=4)
        found[f"rng.{name}"] = _digest(data)
    return found


def save_record(engine: Any, folder: str) -> None:
    """Write the record of the checkpoint that this rank has just saved in `folder`.

    The random-number states are read from verl's file, because the live ones may have changed since it was written.
    """
    parts = _parts(engine.checkpoint_manager, "save")
    record = engine_state(engine, parts)
    if "extra" in parts:
        record |= random_state(load_part(Path(folder) / f"extra_state_{_shard(engine)}.pt")["rng"])
    write_json(_record(engine, folder), record)


def check_files(engine: Any, folder: str) -> None:
    """Raise UserError if one of this rank's files in `folder` could run code when verl unpickles it."""
    refuse_code(sorted(Path(folder).glob(f"*_{_shard(engine)}.pt")))


def check_record(engine: Any, folder: str) -> str:
    """Compare the state loaded from `folder` with its record. Return one line that says what was compared.

    If something differs, raise a UserError that names up to eight tensors.
    """
    path = _record(engine, folder)
    if not path.is_file():
        return f"{folder} has no record of QaRL's: loaded unchecked"
    saved: State = json.loads(path.read_text(encoding="utf-8"))
    parts = _parts(engine.checkpoint_manager, "load") & {_part(name) for name in saved}
    saved = {name: digest for name, digest in saved.items() if _part(name) in parts}
    live = engine_state(engine, parts)
    if "extra" in parts:
        live |= random_state(engine.checkpoint_manager.get_rng_state())
    wrong = sorted(name for name in saved.keys() | live.keys() if saved.get(name) != live.get(name))
    if wrong:
        raise UserError(
            f"{len(wrong)} parts of the loaded state differ from what was saved",
            where=f"{folder}, rank {engine.rank}: {', '.join(wrong[:8])}",
            why="a file of the checkpoint was damaged or replaced, or verl did not load all of it",
            fix="resume from an earlier checkpoint (trainer.resume_mode=resume_path)",
        )
    digest = _digest(repr(sorted(live.items())).encode())
    of = ", ".join(part for part in PARTS if part in parts)
    return f"resumed state equals the saved one by checksum: {len(live)} parts, {digest} (of {of or 'nothing'})"


def _parts(manager: Any, action: str) -> set[str]:
    """Return the parts that verl's checkpoint manager saves or loads. `action`: "save" or "load"."""
    return {part for part in PARTS if getattr(manager, f"should_{action}_{part}")}


def _part(name: str) -> str:
    """Return the checkpoint part to which the record's entry `name` belongs."""
    first = name.partition(".")[0]
    return first if first in PARTS else "extra"


def _record(engine: Any, folder: str) -> Path:
    return Path(folder) / f"qarl_state_{_shard(engine)}.json"


def _shard(engine: Any) -> str:
    return f"world_size_{torch.distributed.get_world_size()}_rank_{engine.rank}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
