"""Whether a run's checkpoints and its export fit on the disk. With backend=verl a full disk ends the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from qarl.checks.check import Finding, Findings, Status
from qarl.checks.memory import checkpoint_bytes, readable
from qarl.checks.model_size import ModelSize
from qarl.config import Config


def space(config: Config, size: ModelSize) -> Findings:
    """Compare the free space with what the run will write by steps and at its end, less what a resumed run has already.
    There is a warning if that leaves no room for other files, or for checkpoints by time."""
    run_dir, trainer = config.run_dir.absolute(), config.trainer
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    sizes, free = checkpoint_bytes(size, config), shutil.disk_usage(existing).free
    saves = trainer.total_training_steps // trainer.save_freq + 1 if trainer.save_freq > 0 else 0
    if trainer.save_final and config.backend == "verl":
        saves = max(saves, 1)  # the export is made from a checkpoint
    if trainer.max_ckpt_to_keep is not None:  # an old checkpoint is deleted only after the new one is complete
        saves = min(saves, trainer.max_ckpt_to_keep + 1)
    export = sizes["export"] if trainer.save_final else 0
    needed, there = export + saves * sizes["resumable"], _bytes_in(run_dir / "checkpoints")
    by_time = 2 * sizes["resumable"] if trainer.save_minutes > 0 and trainer.total_training_steps > 2 else 0
    room = free + there
    what = (
        f"{readable(free)} free; the run needs {readable(needed)}: export {readable(export)}, and up to {saves} "
        f"checkpoints of {readable(sizes['resumable'])} each"
    )
    what += f"; it has {readable(there)} of them" if there else ""
    fix = "free some space, set output_dir to another disk, or lower trainer.max_ckpt_to_keep"
    status: Status = "error" if room < needed else "warning" if room < needed + max(needed, by_time) else "ok"
    yield Finding(status, what, where=str(existing), fix=fix)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
