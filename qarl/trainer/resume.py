"""Decide whether a run starts fresh or from a checkpoint. This needs only the run folder and the config.

    trainer.resume_mode=auto         an interrupted run of this name resumes; a finished one is moved aside
                        disable      any earlier run of this name is moved aside
                        resume_path  resume from the checkpoint trainer.resume_from_path; if an interrupted run of this
                                     name already started from it, resume from the newest checkpoint of that run

A run is finished if its summary says that it reached `total_training_steps` and that everything was written. verl
has the same three modes, but it resumes with any config, and from any folder with the right name, even an incomplete
one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from qarl.checkpoint.resumable import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    newest_good,
    open_checkpoint,
)
from qarl.checkpoint.storage import (
    METRICS_FILE,
    SUMMARY_FILE,
    checkpoints_dir,
    fresh_run_dir,
    holds_a_run,
    recover,
    set_aside,
)
from qarl.checks.inputs_record import Record
from qarl.config import Config
from qarl.config.errors import show
from qarl.config.schema import default_values
from qarl.config.types import as_dotted
from qarl.config.unused_keys import unread
from qarl.console import note, say
from qarl.errors import UserError
from qarl.metrics.tracker import forget_steps_after, has_lost_steps
from qarl.report.damage import damage_of
from qarl.trainer.finished_run import notes_of_finished
from qarl.trainer.input_changes import Inputs
from qarl.trainer.run_lock import lock_run
from qarl.trainer.taken_names import check_names


def _keys(**sections: str) -> frozenset[str]:
    return frozenset(
        f"{section}.{key}" for section, keys in sections.items() for key in keys.split()
    )


_VALIDATION = _keys(rollout="val_temperature val_n", data="val_files")
"""Keys that only change what a validation measures."""
_LENGTH = "trainer.total_training_steps"
_FREE = {"name", "output_dir", "dry_run", "plugins"} | _keys(
    trainer="total_training_steps test_freq val_before_train val_max_prompts logger progress plots report save_final "
    "save_freq save_minutes save_best max_ckpt_to_keep resume_mode resume_from_path",
    rollout="rebuild_on_failure",
    quant="mismatch_limit",
    reward="timeout_s workers check_ground_truths",
    multi_turn="timeout_s workers",
    model="trust_remote_code",
    lora="path",
)
"""Keys that a resume may change without a note. They only set the length and the output of the run, or error messages
of a run tell the user to change them."""
_ROUNDING = _keys(
    trainer="num_threads",
    model="gradient_checkpointing use_remove_padding",
    actor="ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
    "log_prob_max_token_len_per_gpu",
    rollout="max_num_seqs max_num_batched_tokens gpu_memory_utilization cpu_kvcache_space_gib enforce_eager "
    "enable_prefix_caching free_cache_engine",
)
"""Keys that limit memory or set threads. If they change, the training is the same, but the rounding differs."""
FORMER_DEFAULTS = {"model.gradient_checkpointing": False, "rollout.max_num_seqs": 256}
"""Defaults of keys whose default is null now, which means the same on a CPU."""
UNTRAINED = _FREE | _ROUNDING | _VALIDATION
"""Every key that a resume may change."""
_RANKS = _keys(trainer="nnodes n_gpus_per_node")


@dataclass(frozen=True)
class Start:
    """How a run starts. `damaged`: the skipped checkpoints and their errors. `notes`: messages for the user. `fresh`:
    why the run does not resume."""

    checkpoint: Checkpoint | None = None
    damaged: tuple[tuple[Path, CheckpointError], ...] = ()
    notes: tuple[str, ...] = ()
    fresh: str = ""

    def stays_in(self, run_dir: Path) -> bool:
        """Return whether the run resumes in `run_dir`. If not, an earlier run in this folder is moved aside."""
        return self.checkpoint is not None and belongs_to(self.checkpoint.folder, run_dir)


def _nothing(checkpoint: Checkpoint | None) -> None:
    """There is nothing to prepare."""


@contextmanager
def open_run(
    config: Config,
    record: Record | None = None,
    prepare: Callable[[Checkpoint | None], object] = _nothing,
) -> Iterator[Checkpoint | None]:
    """Lock the run folder, and yield the checkpoint to resume from, or None if the run starts fresh.

    `record`: what the run reads, to compare with what the run of the checkpoint read. None: compare only the configs.
    `prepare`: called with that checkpoint when nothing stands against the run any more, and before the folder is
    changed, so that its errors leave an earlier run as it is.

    If the run starts fresh, earlier runs are moved aside. Files that a killed process left incomplete are removed. Call
    `make_newest` after the resume. Raises UserError if another process uses the run folder, and for
    the reasons that `find_start` lists."""
    run_dir = config.run_dir
    with lock_run(run_dir) as locked:
        for done in [*recover(run_dir), *recover(checkpoints_dir(run_dir), alone=locked)]:
            note(done)
        start = find_start(config, record)
        if start.stays_in(run_dir) or not holds_a_run(run_dir):
            check_names(config)
        prepare(start.checkpoint)
        for folder, problem in start.damaged:
            name = set_aside(folder, "damaged").name
            note(
                f"{problem.what} ({problem.why}); it was renamed to {name}, and an earlier checkpoint is used"
            )
        for text in start.notes:
            note(text)
        checkpoint = start.checkpoint
        say(
            start_line(
                config, (checkpoint.folder, checkpoint.step) if checkpoint else None, start.fresh
            )
        )
        if not start.stays_in(run_dir):
            fresh_run_dir(run_dir)
    with lock_run(run_dir):  # of the new folder, if the earlier one was moved aside
        yield start.checkpoint


def find_start(config: Config, record: Record | None = None) -> Start:
    """Return how a run of `config` starts. Checkpoints are read and compared with their digests. No file is changed.
    `record`: as in `open_run`. Raise UserError if the checkpoint to resume from is missing or damaged, or if the
    config, or what it names, changes what is trained."""
    settings = config.trainer
    run_dir = config.run_dir
    check_backend(config)
    if settings.resume_mode == "disable":
        return Start(fresh="trainer.resume_mode=disable")
    if settings.resume_from_path is not None:
        start = _descendant(config, Path(settings.resume_from_path))
        start = start or Start(_given(Path(settings.resume_from_path)))
    elif is_finished(run_dir):
        return Start(fresh=why_fresh(run_dir), notes=notes_of_finished(config))
    else:
        start = _newest(run_dir)
    if start.checkpoint is None:
        return replace(start, fresh=why_fresh(run_dir))
    checkpoint = start.checkpoint
    inputs = Inputs(checkpoint.state.get("inputs"), record) if record is not None else None
    notes = check_changes(
        config, checkpoint.folder, checkpoint.step, checkpoint.config, inputs=inputs
    )
    return replace(start, notes=notes)


def may_resume(config: Config) -> bool:
    """Return whether there may be a checkpoint from which a run of `config` resumes. No file is read."""
    if config.trainer.resume_mode == "disable":
        return False
    return checkpoints_dir(config.run_dir).is_dir() or config.trainer.resume_from_path is not None


def check_backend(config: Config) -> None:
    """Raise UserError if the run folder holds an unfinished run of another backend, which would be moved aside.

    The backends' checkpoints differ, so neither resumes the other's."""
    run_dir = config.run_dir
    if (
        config.trainer.resume_mode == "disable"
        or is_finished(run_dir)
        or not checkpoints_dir(run_dir).is_dir()
    ):
        return
    try:
        saved = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        backend = str(saved["backend"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return
    if backend != config.backend and any(checkpoints_dir(run_dir).iterdir()):
        raise UserError(
            f"the run {run_dir.name!r} is one of backend={backend}, and backend={config.backend} cannot resume it",
            where=str(run_dir),
            why="the checkpoints of the two backends have different formats",
            fix=f"set backend={backend}, choose a different name=..., or set trainer.resume_mode=disable to move that "
            "run aside and start fresh",
        )


def why_fresh(run_dir: Path) -> str:
    """Return why a run in `run_dir` does not resume, if no checkpoint was chosen by the config and none is there."""
    if is_finished(run_dir):
        return f"the run in {run_dir} is finished"
    return (
        f"the run in {run_dir} has no checkpoint"
        if holds_a_run(run_dir)
        else f"there is no run in {run_dir}"
    )


def start_line(config: Config, checkpoint: tuple[Path, int] | None, fresh: str) -> str:
    """Return one line: whether the run resumes and from where, and when it will save checkpoints.

    `checkpoint`: folder and step of the checkpoint to resume from, or None. `fresh`: why there is none."""
    trainer = config.trainer
    begins = f"fresh, because {fresh}"
    if checkpoint is not None:
        begins = f"resumes from {checkpoint[0]}, after step {checkpoint[1]} of {trainer.total_training_steps}"
    when = [f"every {trainer.save_freq} steps"] if trainer.save_freq > 0 else []
    if trainer.save_minutes > 0:
        when += [f"every {trainer.save_minutes:g} minutes"] + ["at Ctrl-C"] * (
            config.backend == "local"
        )
    if trainer.save_best:
        when.append("after the best evaluation")
    if config.backend == "verl" and not when and trainer.save_final:
        when = ["only after the last step (trainer.save_freq=N saves earlier)"]
    saves = ", ".join(when) or "never, so this run cannot resume (trainer.save_freq=N)"
    return f"start: {begins}; checkpoints: {saves}"


def make_newest(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Make `checkpoint` the newest in `run_dir`: rename those of later steps, and delete the old summary.

    Call this after a successful resume. It does nothing if the checkpoint belongs to a different run."""
    if belongs_to(checkpoint.folder, run_dir):
        supersede(run_dir, list_checkpoints(checkpoints_dir(run_dir)), checkpoint.step)


def supersede(run_dir: Path, checkpoints: Iterable[tuple[int, Path]], step: int) -> None:
    """Rename the checkpoints of steps after `step`, and remove the metrics of those steps and the old summary.

    The metrics would else count as those of this run, which may end before it reaches these steps."""
    for later, folder in checkpoints:
        if later > step:
            renamed = set_aside(folder, "superseded").name
            note(
                f"{folder} is of a later step than the one that the run resumes from; it was renamed to {renamed}"
            )
    forget_steps_after(run_dir, step)
    if step > 1 and has_lost_steps(run_dir, step):  # the checkpoint's own step is logged again
        note(
            f"{run_dir / METRICS_FILE} has lost the steps up to {step}: summary, plots and report begin after them"
        )
    if text := damage_of(run_dir / METRICS_FILE):
        note(text)
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)


def is_finished(run_dir: Path) -> bool:
    """Return whether the summary in `run_dir` says that the run is finished."""
    try:
        return bool(json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))["finished"])
    except (OSError, ValueError, KeyError, TypeError):  # a power cut can leave it empty
        return False


def belongs_to(folder: Path, run_dir: Path) -> bool:
    """Return whether the checkpoint in `folder` is one of the run in `run_dir`, whose folder of checkpoints may be a
    link to another disk."""
    is_inside = folder.resolve().is_relative_to(run_dir.resolve())
    return is_inside or folder.resolve().parent == checkpoints_dir(run_dir).resolve()


def _newest(run_dir: Path) -> Start:
    """Return the newest good checkpoint, and all newer checkpoints, which are damaged."""
    checkpoint, problems = newest_good(checkpoints_dir(run_dir))
    if problems and checkpoint is None:
        _, newest = problems[0]
        raise UserError(
            f"all {len(problems)} checkpoints of the run are damaged",
            where=str(checkpoints_dir(run_dir)),
            why=f"{newest.what}: {newest.why}",
            fix="replace one with a good copy, or set trainer.resume_mode=disable to move this run aside and start "
            "fresh",
        )
    return Start(checkpoint, tuple(problems))


def _given(folder: Path) -> Checkpoint:
    """Return the checkpoint that `trainer.resume_from_path` names."""
    try:
        return open_checkpoint(folder)
    except CheckpointError as error:
        where = "trainer.resume_from_path"
        raise CheckpointError(error.what, where=where, why=error.why, fix=error.fix) from error


def _descendant(config: Config, origin: Path) -> Start | None:
    """Return the newest checkpoint in the run folder, if an interrupted run that started from `origin` wrote it.

    Otherwise return None. The config in each checkpoint names the checkpoint that its run started from."""
    run_dir = config.run_dir
    checkpoint, problems = newest_good(checkpoints_dir(run_dir))
    if checkpoint is None or is_finished(run_dir):
        return None
    began = checkpoint.config["trainer"].get("resume_from_path")
    if began is None or Path(began).resolve() != origin.resolve():
        return None
    return Start(checkpoint, tuple(problems))


def check_changes(
    config: Config,
    folder: Path,
    step: int,
    saved: Mapping[str, Any],
    *,
    also: Mapping[str, tuple[Any, Any]] | None = None,
    inputs: Inputs | None = None,
) -> tuple[str, ...]:
    """Check that a run of `config` may resume from the checkpoint of `step` in `folder`. Return notes for the user.

    `saved`: the config in the checkpoint. `also`: more changed keys with old and new value. `inputs`: what the run read
    and reads, if that is to be compared, too. Raises UserError if the run may not resume."""
    changed = changed_keys(saved, config)
    # Training begins at the checkpoint, whatever the starting adapter is now, but a KL term's reference has it.
    free = UNTRAINED - {"lora.path"} if config.actor.use_kl_loss else UNTRAINED
    other = {key: values for key, values in changed.items() if key not in free} | dict(also or {})
    if set(other.get("actor.old_log_probs", ())) == {"auto", "recompute"}:
        del other[
            "actor.old_log_probs"
        ]  # `auto` takes the rollout's log-probs where they are those of `recompute`
    renamed = inputs.renamed(other) if inputs is not None else {}
    other = {key: values for key, values in other.items() if key not in renamed}
    if other.keys() and other.keys() <= _RANKS:
        raise _other_ranks(folder, other)
    if other:
        raise UserError(
            f"the run cannot resume from {folder}: the config changes what is trained",
            where="; ".join(
                f"{key} was {show(old)}, now {show(new)}" for key, (old, new) in other.items()
            ),
            why="the rest of the run would be a different experiment than its beginning",
            fix="set these keys to their old values, or start fresh: a new name=..., or trainer.resume_mode=disable",
        )
    if step > config.trainer.total_training_steps:
        raise UserError(
            f"the checkpoint is of step {step}, past the end of the run",
            where=f"trainer.total_training_steps={config.trainer.total_training_steps}",
            fix="raise trainer.total_training_steps, or resume from an earlier checkpoint (resume_mode=resume_path)",
        )
    notes = [
        f"{key} was {show(old)}, now {show(new)}: it has the same content"
        for key, (old, new) in renamed.items()
    ]
    if inputs is not None:
        notes += inputs.check(folder)
    if rounding := sorted(changed.keys() & _ROUNDING):
        notes.append(
            f"changed {', '.join(rounding)}: the training is the same, but rounds differently than an uninterrupted run"
        )
    if validation := sorted(changed.keys() & _VALIDATION):
        notes.append(
            f"changed {', '.join(validation)}: figures of validations before and after cannot be compared"
        )
    if _LENGTH in changed and config.optim.lr_scheduler_type == "cosine":
        before, now = changed[_LENGTH]
        notes.append(
            f"{_LENGTH} was {before}, now {now}: with lr_scheduler_type=cosine the learning rates from now on "
            f"are those of a run of {now} steps"
        )
    return tuple(notes)


def _other_ranks(folder: Path, changed: Mapping[str, tuple[Any, Any]]) -> UserError:
    return UserError(
        f"the run cannot resume from {folder} on another number of ranks",
        where="; ".join(
            f"{key} was {show(old)}, now {show(new)}" for key, (old, new) in changed.items()
        ),
        why="in a checkpoint of verl each rank has its own part of the weights and of the optimizer's state",
        fix="set these keys to their old values; or export the checkpoint (qarl export ... format=fp32), and start a "
        "new run with model.path set to the export",
    )


def version_notes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a note for each part of versions.json that differs from that of the checkpoint."""
    changed = [
        (key, before, now[key])
        for key, before in saved.items()
        if key in now and now[key] != before
    ]
    return [
        f"changed since the checkpoint, bits may differ: {key} {old} -> {new}"
        for key, old, new in changed
    ]


def changed_keys(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (value in the checkpoint, value now) for each changed key.

    A key of the checkpoint that had no effect there does not count. A key that the checkpoint lacks, because it is
    newer, had its default."""
    before = as_dotted(saved)
    now = as_dotted(config.model_dump(mode="json"))
    for key, default in default_values().items():
        before.setdefault(key, default)
    for key, _ in list(unread(before, default_values())):
        del before[key]
    for key, former in FORMER_DEFAULTS.items():
        if now[key] is None and before.get(key) == former:
            before[key] = None
    return {
        key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]
    }
