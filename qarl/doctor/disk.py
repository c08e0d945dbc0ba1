"""Checks the run folder: whether it is writable, has enough space, and contains an earlier run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from qarl.checkpoint import run_folder
from qarl.checks.memory import checkpoint_bytes, readable
from qarl.config import Config
from qarl.doctor.context import Context
from qarl.doctor.findings import Topic
from qarl.errors import UserError
from qarl.trainer.resume import check_free, find_start
from qarl.verl.checkpoint import find_verl_start


def check_folder(context: Context, topic: Topic) -> None:
    """Whether the run folder can be written to."""
    run_dir = context.config.run_dir
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if existing.is_dir():
        problem = _write_problem(existing)
    else:
        problem = "File exists" if existing == run_dir else "Not a directory"
    if problem:
        fix = "set output_dir to a folder that can be written to"
        raise UserError("the config cannot be written", where=str(run_dir / "config.yaml"), why=problem, fix=fix)
    topic.ok(f"{run_dir} can be written to")


def check_start(context: Context, topic: Topic) -> None:
    """Whether the run starts fresh or resumes from a checkpoint."""
    config = context.config
    run_dir = config.run_dir
    if config.backend == "verl":
        step, stays = find_verl_start(config)
        origin = config.trainer.resume_from_path or str(run_dir)
    else:
        check_free(run_dir)
        start = find_start(config)
        stays = start.stays_in(run_dir)
        step, origin = (start.checkpoint.step, str(start.checkpoint.folder)) if start.checkpoint else (0, "")
        for folder, problem in start.damaged:
            fix = "replace it with a good copy, or let the run continue from the earlier checkpoint"
            topic.warning(f"{problem.what}: it will be renamed", where=str(folder), why=problem.why, fix=fix)
        for note in start.notes:
            topic.note(note, fix="nothing to do, if that is what you want")
    if step:
        topic.ok(f"the run resumes from step {step} ({origin})")
    elif not run_folder.holds_a_run(run_dir):
        topic.ok("the run starts fresh")
    if not stays and run_folder.holds_a_run(run_dir):
        topic.note(
            f"{run_dir} contains an earlier run, which will be moved to {run_dir}.1 or the next free number",
            fix="nothing to do, or choose a different name=...",
        )


def check_space(context: Context, topic: Topic) -> None:
    """Whether there is enough disk space for the checkpoints and the export."""
    run_dir = context.config.run_dir.absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    sizes = checkpoint_bytes(context.size.get(), context.config)
    free = shutil.disk_usage(existing).free
    trainer = context.config.trainer
    export = sizes["export"] if trainer.save_final else 0
    # An old checkpoint is deleted only after the new one is complete.
    saves = trainer.total_training_steps // trainer.save_freq + 1 if trainer.save_freq > 0 else 0
    if trainer.save_final and context.config.backend == "verl":
        saves = max(saves, 1)  # the export is made from a checkpoint
    kept = saves if trainer.max_ckpt_to_keep is None else min(saves, trainer.max_ckpt_to_keep + 1)
    needed = export + kept * sizes["resumable"]
    by_time = _saves_by_time(context.config)
    more = max(by_time if trainer.max_ckpt_to_keep is None else min(by_time, trainer.max_ckpt_to_keep + 1) - kept, 0)
    wanted = needed + more * sizes["resumable"]
    what = (
        f"{readable(free)} free; the run needs {readable(needed)}: export {readable(export)}, and up to {kept} "
        f"checkpoints of {readable(sizes['resumable'])} each"
    )
    if more:
        what += f"; trainer.save_minutes may need {more} more"
    fix = "free some space, set output_dir to another disk, or lower trainer.max_ckpt_to_keep"
    if free < needed:
        topic.error(what, where=str(existing), fix=fix)
    elif free < max(2 * needed, wanted):
        topic.warning(what, where=str(existing), fix=fix)
    else:
        topic.ok(what)


def _saves_by_time(config: Config) -> int:
    """Return how many checkpoints of `trainer.save_minutes` may be on disk at once: the newest, and the next."""
    trainer = config.trainer
    return min(2, trainer.total_training_steps - 1) if trainer.save_minutes > 0 else 0


def _write_problem(folder: Path) -> str | None:
    """Try to make a folder in `folder`. Return why it fails, or None. `os.access` would not notice read-only disks."""
    try:
        with tempfile.TemporaryDirectory(prefix=".qarl-doctor-", dir=folder):
            return None
    except OSError as error:
        return error.strerror


CHECKS = (check_folder, check_start, check_space)
