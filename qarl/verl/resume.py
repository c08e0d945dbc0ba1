"""Decides whether a verl run starts fresh or from a checkpoint, by the rules of `qarl.trainer.resume`.

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

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.open import refuse_code, step_of, what_is_missing
from qarl.checkpoint.storage import fresh_run_dir
from qarl.config import Config
from qarl.console import note, say
from qarl.errors import UserError
from qarl.trainer.resume import check_changes, is_finished, lock_run, start_line, supersede, why_fresh

TRACKER = "latest_checkpointed_iteration.txt"
# Keys of the section `verl` that change where and how fast a run trains, but not its result.
_FREE_VERL = re.compile(r"\+?(trainer|ray_kwargs|global_profiler|transfer_queue)\.|.*offload")


@contextmanager
def open_verl_run(config: Config) -> Iterator[int]:
    """Lock the run folder and yield the step after which verl resumes. 0 means that the run starts fresh.

    An earlier run in the folder is moved aside, except if this run resumes it.

    Raises:
        UserError: another process uses the run; the checkpoint is missing, incomplete or could run code; or the config
            changes what is trained.
    """
    run_dir = config.run_dir
    with lock_run(run_dir):
        folder = _choose(config)
        disabled = config.trainer.resume_mode == "disable"
        fresh = "trainer.resume_mode=disable" if disabled else why_fresh(run_dir)
        say(start_line(config, (folder, step_of(folder)) if folder else None, fresh))
        if folder is None or not folder.resolve().is_relative_to(run_dir.resolve()):
            fresh_run_dir(run_dir)
        else:
            _make_newest(run_dir, folder)
    with lock_run(run_dir, create=True):
        yield 0 if folder is None else step_of(folder)


def find_verl_start(config: Config) -> tuple[int, bool]:
    """Return the step after which verl resumes, and whether that checkpoint is in the run's own folder. No file is
    changed.

    Raise the same UserErrors as `open_verl_run`.
    """
    folder = _choose(config)
    if folder is None:
        return 0, False
    return step_of(folder), folder.resolve().is_relative_to(config.run_dir.resolve())


def newest_whole(checkpoints: Path) -> Path | None:
    """Return the checkpoint that verl's tracker file names. If it is incomplete, print a note and return the newest
    complete one. Return None if there are no checkpoints. Raise UserError if all checkpoints are incomplete."""
    tracker = checkpoints / TRACKER
    folders = sorted((folder for folder in checkpoints.glob("global_step_*") if step_of(folder)), key=step_of)
    named = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    if not named and not folders:
        return None
    problem = what_is_missing(checkpoints / f"global_step_{named}")
    if problem is None:
        return checkpoints / f"global_step_{named}"
    whole = next((folder for folder in reversed(folders) if what_is_missing(folder) is None), None)
    if whole is None:
        raise UserError(
            "the run has no complete checkpoint",
            where=str(checkpoints),
            why=f"{tracker.name} says {named!r}: {problem}",
            fix="copy the checkpoint again, or set trainer.resume_mode=disable to move the run aside and start fresh",
        )
    note(f"{tracker} says {named!r} ({problem}); {whole.name} is the newest complete checkpoint and is used instead")
    return whole


def _choose(config: Config) -> Path | None:
    settings, run_dir = config.trainer, config.run_dir
    if settings.resume_mode == "disable":
        return None
    if settings.resume_from_path is not None:
        folder: Path | None = Path(settings.resume_from_path)
        if problem := what_is_missing(Path(settings.resume_from_path)):
            raise UserError(
                f"{folder} is not a complete checkpoint of verl",
                where="trainer.resume_from_path",
                why=problem,
                fix="give a complete folder RUN/checkpoints/global_step_N",
            )
    else:
        folder = None if is_finished(run_dir) else newest_whole(run_dir / "checkpoints")
    if folder is not None:
        _check_config(config, folder)
        refuse_code(sorted(folder.rglob("*.pt")))
    return folder


def _check_config(config: Config, folder: Path) -> None:
    """Raise UserError if a run of `config` may not resume from `folder`. Print a note for each permitted change."""
    path = folder.resolve().parents[1] / "config.yaml"
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        saved = None
    if not isinstance(saved, Mapping):
        note(f"{path} is missing or not readable, so the run's first config is not compared with this one")
        return
    before, now = _training_keys(saved.get("verl") or {}), _training_keys(config.verl)
    own = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    rest = {key: value for key, value in saved.items() if key != "verl"}
    also = {f"verl.{key}": pair for key, pair in own.items()}
    for text in check_changes(config, folder, step_of(folder), rest, also=also):
        note(text)


def _training_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not _FREE_VERL.match(key)}


def _make_newest(run_dir: Path, folder: Path) -> None:
    """Write the step of `folder` into verl's tracker file. Rename later checkpoints, and delete the run's summary."""
    supersede(run_dir, [(step_of(other), other) for other in folder.parent.glob("global_step_*")], step_of(folder))
    staging = folder.parent / f".{TRACKER}"
    staging.write_text(str(step_of(folder)), encoding="utf-8")
    staging.replace(folder.parent / TRACKER)
