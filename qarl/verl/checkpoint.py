"""Checkpoints of a verl run: from which one it resumes, when it saves by time, and a record of each rank's state.

A run resumes by the rules of `qarl.trainer.resume` (`open_verl_run`). verl resumes from the checkpoint that its tracker
file names (`checkpoints/latest_checkpointed_iteration.txt`), whatever the config is. If data.pt is missing from the
checkpoint, verl restarts the data without a message (verl 0.9.1, trainer/ppo/v1/trainer_base.py,
utils/checkpoint/fsdp_checkpoint_manager.py). QaRL is stricter:

- It compares the config with that of the checkpoint.
- It ignores incomplete checkpoints, and writes the step of the newest complete one into the tracker file.
- It refuses a checkpoint that could run code, because verl unpickles it.

There is one departure from the local backend: with `trainer.resume_mode=resume_path` a repeated command starts from
that checkpoint again, not from those that the run has written since.

verl saves every `trainer.save_freq` steps and, at a positive frequency, after the last step (`PPOTrainer.fit`). These
checkpoints stay. `trainer.save_minutes` adds those of `qarl.trainer.checkpoints` (`Saving`): a file `BY_TIME` marks
them in their folders, so that a resumed run, too, knows which one the next replaces. With
`trainer.max_actor_ckpt_to_keep` verl removes old checkpoints of both kinds itself, but not those from before a resume,
which it does not know. `Saving` removes these.

For each rank, verl writes shards of model and optimizer and the states of scheduler and random generators. It loads
them without checks. QaRL writes a small JSON beside them with a checksum of every tensor (`save_record`), and compares
the live state with it after a load (`check_record`). If a file was truncated or swapped, or a load left something out,
the run ends with an error that names the tensor instead of continuing from a wrong state. `checkpoint.save_contents`
and `load_contents` may tell verl not to save or load some parts. Those parts are neither recorded nor compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from qarl.checkpoint.read_weights import (
    load_part,
    refuse_code,
    step_of,
    what_is_missing,
    whole_and_torn,
)
from qarl.checkpoint.storage import (
    StorageError,
    fresh_run_dir,
    holds_a_run,
    remove_folder,
    write_json,
    write_text,
)
from qarl.checks.check import NotCheckedError, RunInputs
from qarl.checks.inputs_record import RECORD_FILE, Record
from qarl.checks.memory import checkpoint_bytes, readable
from qarl.config import Config
from qarl.console import note, say
from qarl.errors import UserError
from qarl.metrics.tracker import VERSIONS_FILE, versions
from qarl.optim.muon import local_part
from qarl.rollout.publish.checksum import checksums
from qarl.trainer.input_changes import Inputs
from qarl.trainer.resume import (
    belongs_to,
    check_backend,
    check_changes,
    is_finished,
    start_line,
    supersede,
    version_notes,
    why_fresh,
)
from qarl.trainer.run_lock import lock_run
from qarl.trainer.taken_names import check_names

TRACKER = "latest_checkpointed_iteration.txt"
# Keys of the section `verl` that change where and how fast a run trains, but not its result.
_FREE_VERL = re.compile(r"\+?(trainer|ray_kwargs|global_profiler|transfer_queue)\.|.*offload")
BY_TIME = "saved_by_time"
PARTS = ("model", "optimizer", "extra")
"""verl's names for the parts of a rank's state. `extra` holds the scheduler's state and the random-number states."""
FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""How the name of each part's file begins."""
State = dict[str, str]

_log = logging.getLogger("qarl.verl")


@contextmanager
def open_verl_run(config: Config, record: Record | None = None) -> Iterator[int]:
    """Lock the run folder and yield the step after which verl resumes. 0 means that the run starts fresh.

    `record`: what the run reads, to compare with what the run of the checkpoint read. None: compare only the configs.

    An earlier run in the folder is moved aside, except if this run resumes it.

    Raises:
        UserError: another process uses the run; the checkpoint is missing, incomplete or could run code; or the config,
            or what it names, changes what is trained.
    """
    run_dir = config.run_dir
    with lock_run(run_dir):
        folder = _choose(config, record)
        moves = holds_a_run(run_dir) and (folder is None or not belongs_to(folder, run_dir))
        if not moves:
            check_names(config)
        disabled = config.trainer.resume_mode == "disable"
        fresh = "trainer.resume_mode=disable" if disabled else why_fresh(run_dir)
        say(start_line(config, (folder, step_of(folder)) if folder else None, fresh))
        if folder is not None and belongs_to(folder, run_dir):
            _make_newest(run_dir, folder)
        else:
            fresh_run_dir(run_dir)
    with lock_run(run_dir):  # of the new folder, if the earlier one was moved aside
        yield 0 if folder is None else step_of(folder)


def find_verl_start(config: Config, record: Record | None = None) -> tuple[int, bool]:
    """Return the step after which verl resumes, and whether that checkpoint is in the run's own folder. No file is
    changed.

    Raise the same UserErrors as `open_verl_run`.
    """
    folder = _choose(config, record)
    if folder is None:
        return 0, False
    return step_of(folder), belongs_to(folder, config.run_dir)


def newest_whole(checkpoints: Path, *, all_parts: bool = True) -> Path | None:
    """Return the newest checkpoint from which a run can resume. If a later one is incomplete, print a note. Return None
    if there are no checkpoints. Raise UserError if all are incomplete. `all_parts`: as in `lacks`."""
    whole, torn = whole_and_torn(checkpoints)
    for step, folder in sorted(whole.items()):
        if problem := lacks(folder, all_parts=all_parts):
            torn[step] = problem
            del whole[step]
    newest = max(whole, default=0)
    last = max(torn, default=0)
    if last and not newest:
        raise UserError(
            "the run has no complete checkpoint",
            where=str(checkpoints / f"global_step_{last}"),
            why=torn[last],
            fix="copy the checkpoint again, or set trainer.resume_mode=disable to move the run aside and start fresh",
        )
    if last > newest:
        note(
            f"global_step_{last} is incomplete ({torn[last]}); global_step_{newest} is the newest complete checkpoint"
        )
    return whole.get(newest)


def lacks(folder: Path, *, all_parts: bool = True) -> str | None:
    """Return why no run can resume from `folder`, or None if one can. An export needs less (`what_is_missing`).

    `all_parts`: whether the run loads all that was saved. The records of QaRL say what was."""
    if (problem := what_is_missing(folder)) or not all_parts:
        return problem
    for record in sorted((folder / "actor").glob("qarl_state_*.json")):
        names = _saved_json(record)
        if names is None:
            return f"actor/{record.name} is damaged"
        shard = record.stem.removeprefix("qarl_state_")
        saved = {_part(name) for name in names}
        for file in sorted(f"{FILES[part]}_{shard}.pt" for part in saved):
            if not zipfile.is_zipfile(folder / "actor" / file):
                return f"actor/{file} is missing or cut short"
    return None


def _choose(config: Config, record: Record | None) -> Path | None:
    settings = config.trainer
    run_dir = config.run_dir
    all_parts = not any("load_contents" in key for key in config.verl)
    check_backend(config)
    if settings.resume_mode == "disable":
        return None
    if settings.resume_from_path is None:
        checkpoints = run_dir / "checkpoints"
        folder = None if is_finished(run_dir) else newest_whole(checkpoints, all_parts=all_parts)
    elif problem := lacks(folder := Path(settings.resume_from_path), all_parts=all_parts):
        what = f"{folder} is not a complete checkpoint of verl"
        fix = "give a complete RUN/checkpoints/global_step_N"
        raise UserError(what, where="trainer.resume_from_path", why=problem, fix=fix)
    if folder is not None:
        _check_config(config, folder, record)
        refuse_code(sorted(folder.rglob("*.pt")))
    return folder


def _check_config(config: Config, folder: Path, record: Record | None) -> None:
    """Raise UserError if a run of `config` may not resume from `folder`. Print a note for each permitted change."""
    path = folder.absolute().parents[1] / "config.yaml"  # not resolved: `checkpoints` may be a link
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        saved = None
    if not saved:
        note(
            f"{path} is missing or not readable, so the run's first config is not compared with this one"
        )
        return
    rest = {key: value for key, value in saved.items() if key != "verl"}
    before = saved.get("verl") or {}
    now = config.verl
    also = {
        f"verl.{key}": (before.get(key), now.get(key))
        for key in before | now
        if before.get(key) != now.get(key) and not _FREE_VERL.match(key)
    }
    file = path.with_name(RECORD_FILE)
    read = _saved_json(file)
    if read is None and file.exists():
        note(f"{file} is damaged, so what the run reads is not compared with what it read before")
        record = None
    inputs = Inputs(read, record) if record is not None else None
    for text in check_changes(config, folder, step_of(folder), rest, also=also, inputs=inputs):
        note(text)
    for text in version_notes(_saved_json(path.with_name(VERSIONS_FILE)) or {}, versions()):
        note(text)


def _saved_json(path: Path) -> dict[str, Any] | None:
    """Return the mapping in `path`, or None if there is none that can be read."""
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved


def _make_newest(run_dir: Path, folder: Path) -> None:
    """Write the step of `folder` into verl's tracker file. Rename later checkpoints, and delete the run's summary."""
    supersede(
        run_dir,
        [(step_of(other), other) for other in folder.parent.glob("global_step_*")],
        step_of(folder),
    )
    write_text(folder.parent / TRACKER, str(step_of(folder)))


def check_room(config: Config, inputs: RunInputs) -> None:
    """Raise UserError if the run will save and the disk has no room for a checkpoint and the export. verl ends a run
    whose disk is full. Nothing is checked if `save_contents` says what a checkpoint has, or if the model's config lacks
    a number."""
    trainer = config.trainer
    folder = (config.run_dir / "checkpoints").resolve()
    saves = trainer.save_freq > 0 or trainer.save_minutes > 0 or trainer.save_final
    if not saves or any("save_contents" in key for key in config.verl):
        return
    try:
        sizes = checkpoint_bytes(inputs.size, config)
    except NotCheckedError:
        return
    needed = sizes["resumable"] + (sizes["export"] if trainer.save_final else 0)
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise UserError(
            f"the disk has no room for a checkpoint: {readable(free)} are free, {readable(needed)} are needed",
            where=str(existing),
            why="verl ends a run that cannot save",
            fix="free some space, or set output_dir to another disk; qarl doctor says what the whole run writes",
        )


class Saving:
    """`trainer`: the section `trainer` of verl's config. Its key `save_minutes` is QaRL's."""

    def __init__(self, trainer: Any) -> None:
        self._freq, self._seconds = trainer.save_freq, 60 * trainer.get("save_minutes", -1)
        self._last = trainer.get("total_training_steps")
        keep = trainer.get("max_actor_ckpt_to_keep")
        self._keep = keep if keep and keep > 0 else None  # verl keeps all at 0 and below
        begins = (
            trainer.get("resume_from_path") if trainer.get("resume_mode") == "resume_path" else None
        )
        self._begins = Path(begins).resolve() if begins else None
        self._checkpoints = Path(trainer.default_local_dir)
        self.begin()

    def begin(self) -> None:
        """Count the minutes from now."""
        self._since = time.monotonic()

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to save after `step` what verl does not save. `last`: whether the run ends with this step. A
        run that has a checkpoint by time replaces it at its end."""
        if self._freq > 0 and (last or step % self._freq == 0):
            return False
        if last:
            return bool(self._passing())
        return 0 < self._seconds <= time.monotonic() - self._since

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, and mark it if the next checkpoint replaces it."""
        folder = self._checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._freq <= 0 or (step % self._freq and step != self._last):
            (folder / BY_TIME).touch()
        return folder

    def saved(self, folder: Path) -> None:
        """Remove the checkpoints that the complete checkpoint in `folder` replaces. Log a warning if that fails."""
        self.begin()
        if what_is_missing(folder) is not None:
            return
        replaced = self._surplus(folder, self._keep) if self._keep else self._passing()
        try:
            for other in replaced:
                # A repeated command begins again from the checkpoint that resume_from_path names.
                if (
                    step_of(other) < step_of(folder)
                    and other.resolve() != self._begins
                    and not other.is_symlink()
                ):
                    remove_folder(other)
        except StorageError as error:
            _log.warning("an old checkpoint stays, training continues: %s", error)

    def _surplus(self, folder: Path, keep: int) -> list[Path]:
        """Return the complete checkpoints before the newest `keep` ones up to that in `folder`. verl itself removes
        those that this process has written."""
        whole, _ = whole_and_torn(self._checkpoints)
        steps = sorted(step for step in whole if step <= step_of(folder))
        return [whole[step] for step in steps[:-keep]]

    def _passing(self) -> list[Path]:
        return [
            mark.parent
            for mark in self._checkpoints.glob(f"global_step_*/{BY_TIME}")
            if step_of(mark.parent)
        ]


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
