"""A record of each rank's state in a checkpoint of verl, and its comparison with what a resumed run has loaded.

For each rank, verl writes shards of model and optimizer and the states of scheduler and random generators. It loads
them without checks. QaRL writes a small JSON beside them with a checksum of every tensor (`save_record`), and compares
the live state with it after a load (`check_record`). If a file was truncated or swapped, or a load left something out,
the run ends with an error that names the tensor instead of continuing from a wrong state. `checkpoint.save_contents`
and `load_contents` may tell verl not to save or load some parts. Those parts are neither recorded nor compared.

The record also has the settings by which the actor multiplies, which must be the same at a resume. `qarl train`
compares them before it starts Ray (`qarl.trainer.resume`); on verl's own command line nothing else does.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from qarl.checkpoint.read_weights import load_part, refuse_code
from qarl.checkpoint.storage import write_json
from qarl.errors import UserError
from qarl.optim.muon import local_part
from qarl.rollout.publish.checksum import checksums

PARTS = ("model", "optimizer", "extra")
"""verl's names for the parts of a rank's state. `extra` holds the scheduler's state and the random-number states."""
FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""How the name of each part's file begins."""
State = dict[str, str]
SETTINGS = ("scheme", "group_size", "ignore", "kernels", "align", "head_dtype", "lora")
"""Keys of the actor's section `quant` that a resume may not change."""
TRAINED_WITH = "quant"
"""The record's entry with their values, as JSON."""


def engine_state(engine: Any, parts: Collection[str] = PARTS) -> State:
    """Return a checksum of every tensor in this rank's shards of model and optimizer, and of the scheduler's state."""
    tensors: dict[str, torch.Tensor] = {}
    state: State = {}
    if "model" in parts:
        tensors |= {
            f"model.{name}": tensor
            for name, tensor in engine.checkpoint_manager.model.state_dict().items()
        }
    if "optimizer" in parts:
        optimizer = engine.optimizer.state_dict()
        for index, entry in optimizer["state"].items():
            tensors |= {
                f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in entry.items()
            }
        groups = [
            {key: group[key] for key in group if key != "params"}
            for group in optimizer["param_groups"]
        ]
        state["optimizer.param_groups"] = _digest(repr(groups).encode())
    if "extra" in parts:
        scheduler = sorted(engine.lr_scheduler.state_dict().items(), key=str)
        state["scheduler"] = _digest(repr(scheduler).encode())
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    # With param_offload verl has only begun to copy them to the host (`non_blocking` in verl/utils/fsdp_utils.py).
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    sums = checksums(local.values())
    return state | {
        name: f"{value & (2**64 - 1):016x}" for name, value in zip(local, sums, strict=True)
    }


def random_state(rng: Any) -> State:
    """Return a digest of each state that `FSDPCheckpointManager.get_rng_state` returns."""
    data = {
        name: v.numpy().tobytes() if isinstance(v, torch.Tensor) else pickle.dumps(v, 4)
        for name, v in rng.items()
    }
    return {f"rng.{name}": _digest(value) for name, value in data.items()}


def save_record(engine: Any, folder: str) -> None:
    """Write the record of the checkpoint that this rank has just saved in `folder`.

    The random-number states are read from verl's file, because the live ones may have changed since it was written.
    """
    parts = _parts(engine.checkpoint_manager, "save")
    record = engine_state(engine, parts)
    if "extra" in parts:
        record |= random_state(load_part(Path(folder) / f"extra_state_{_shard(engine)}.pt")["rng"])
    write_json(_record(engine, folder), record | {TRAINED_WITH: json.dumps(settings_of(engine))})


def check_before_loading(engine: Any, folder: str) -> None:
    """Raise UserError if the actor multiplies in another way than in the run that saved `folder`, or if one of this
    rank's files there could run code when verl unpickles it. A checkpoint of an actor without a section `quant` has no
    record, so its settings are not compared."""
    path = _record(engine, folder)
    if path.is_file():
        saved: State = json.loads(path.read_text(encoding="utf-8"))
        check_settings(engine, saved.get(TRAINED_WITH), folder)
    if engine.quant is not None:
        refuse_code(sorted(Path(folder).glob(f"*_{_shard(engine)}.pt")))


def check_record(engine: Any, folder: str) -> str:
    """Compare the state loaded from `folder` with its record. Return one line that says what was compared.

    If something differs, raise a UserError that names up to eight tensors.
    """
    path = _record(engine, folder)
    if not path.is_file():
        return f"{folder} has no record of QaRL's: loaded unchecked"
    saved: State = json.loads(path.read_text(encoding="utf-8"))
    saved.pop(TRAINED_WITH, None)
    parts = _parts(engine.checkpoint_manager, "load") & {part_of(name) for name in saved}
    saved = {name: digest for name, digest in saved.items() if part_of(name) in parts}
    live = engine_state(engine, parts)
    if "extra" in parts:
        live |= random_state(engine.checkpoint_manager.get_rng_state())
    names = saved.keys() | live.keys()
    wrong = sorted(name for name in names if saved.get(name) != live.get(name))
    if wrong:
        raise UserError(
            f"{len(wrong)} parts of the loaded state differ from what was saved",
            where=f"{folder}, rank {engine.rank}: {', '.join(wrong[:8])}",
            why="a file of the checkpoint was damaged or replaced, or verl did not load all of it",
            fix="resume from an earlier checkpoint (trainer.resume_mode=resume_path)",
        )
    what = f"{len(live)} parts"
    digest = _digest(repr(sorted(live.items())).encode())
    return f"resumed state equals the saved one by checksum: {what}, {digest} (of {', '.join(sorted(parts))})"


def settings_of(engine: Any) -> dict[str, Any]:
    """Return the values of `SETTINGS`, as JSON has them, or nothing if the actor has no section `quant`."""
    if engine.quant is None:
        return {}
    values: dict[str, Any] = engine.quant.model_dump(mode="json", include=set(SETTINGS))
    values["lora"].pop("path", None)  # the folder may have moved
    return values


def check_settings(engine: Any, saved: str | None, folder: str) -> None:
    """Raise UserError if the actor multiplies in another way than in the run that saved `folder`.

    `saved`: the record's entry, which checkpoints of earlier versions lack."""
    if saved is None:
        return
    before = json.loads(saved)
    now = settings_of(engine)
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    if changed:
        each = [f"quant.{name}={now.get(name)}, saved with {before.get(name)}" for name in changed]
        raise UserError(
            "the checkpoint was trained with other settings of quant",
            where=f"{folder}: {'; '.join(each)}",
            why="a resumed run goes on as if it had not been interrupted",
            fix="give the actor and the rollout engine the saved values, or start another run from an export",
        )


def _parts(manager: Any, action: str) -> set[str]:
    """Return the parts that verl's checkpoint manager saves or loads. `action`: "save" or "load"."""
    return {part for part in PARTS if getattr(manager, f"should_{action}_{part}")}


def part_of(name: str) -> str:
    """Return the checkpoint part to which the record's entry `name` belongs."""
    first = name.partition(".")[0]
    return first if first in PARTS else "extra"


def _record(engine: Any, folder: str) -> Path:
    return Path(folder) / f"qarl_state_{_shard(engine)}.json"


def _shard(engine: Any) -> str:
    return f"world_size_{torch.distributed.get_world_size()}_rank_{engine.rank}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
