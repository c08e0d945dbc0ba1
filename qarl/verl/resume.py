"""From which checkpoint a verl run resumes: by the rules of `qarl.trainer.resume` (`open_verl_run`).

verl resumes from the checkpoint that its tracker file names (`checkpoints/latest_checkpointed_iteration.txt`), whatever
the config is. If data.pt is missing from the checkpoint, verl restarts the data without a message (verl 0.9.1,
trainer/ppo/v1/trainer_base.py, utils/checkpoint/fsdp_checkpoint_manager.py). QaRL is stricter:

- It compares the config with that of the checkpoint.
- It ignores incomplete checkpoints, and writes the step of the newest complete one into the tracker file.
- It refuses a checkpoint that could run code, because verl unpickles it.

There is one departure from the local backend: with `trainer.resume_mode=resume_path` a repeated command starts from
that checkpoint again, not from those that the run has written since.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.read_weights import refuse_code, step_of, what_is_missing, whole_and_torn
from qarl.checkpoint.storage import fresh_run_dir, holds_a_run, write_text
from qarl.checks.inputs_record import RECORD_FILE, Record
from qarl.config import Config
from qarl.console import note, say
from qarl.errors import UserError
from qarl.metrics.tracker import VERSIONS_FILE, versions
from qarl.trainer.finished_run import notes_of_finished
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
from qarl.verl.saving import HAS_QUEUE, QUEUE
from qarl.verl.state_record import FILES, part_of

TRACKER = "latest_checkpointed_iteration.txt"
# Keys of the section `verl` that change where and how fast a run trains, but not its result.
_FREE_VERL = re.compile(r"\+?(trainer|ray_kwargs|global_profiler|transfer_queue)\.|.*offload")


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
        if folder is None and not disabled and is_finished(run_dir):
            for text in notes_of_finished(config):
                note(text)
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
    if problem := what_is_missing(folder):
        return problem
    if (folder / HAS_QUEUE).is_file() and not (folder / QUEUE).is_dir():
        return f"{QUEUE}, with the responses that wait, is missing"
    if not all_parts:
        return None
    for record in sorted((folder / "actor").glob("qarl_state_*.json")):
        names = _saved_json(record)
        if names is None:
            return f"actor/{record.name} is damaged"
        shard = record.stem.removeprefix("qarl_state_")
        saved = {part_of(name) for name in names}
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
