"""Checkpoints of the local backend: when they are written, what they contain, and how a run resumes from one.

A resumed run takes the same steps, bit for bit, as an uninterrupted run:

- The prompts of a step depend only on the seed and the position in the data.
- Every request to the engine has its own seed.
- Weights, FP32 masters, optimizer moments and random generators are restored exactly.

After a resume, the digests of weights and published tensors are compared with the checkpoint. A warning is printed if
`mismatch/k3` in the first step is more than ten times as large as in the last step before the resume.

If a checkpoint cannot be written, the run prints a warning, logs `checkpoint/failed` = 1 and continues.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qarl.checkpoint.model_files import ModelFiles, header_shapes, read_tensors, weight_files
from qarl.checkpoint.resumable import (
    Checkpoint,
    damaged,
    prune,
    save_checkpoint,
    tensor_digest,
    tensors_digest,
)
from qarl.checkpoint.storage import StorageError, checkpoints_dir, remove_folder
from qarl.console import stage
from qarl.data.dated_template import fixed_date, written_dates
from qarl.data.digests import prompts_digest
from qarl.errors import UserError
from qarl.metrics.tracker import VERSIONS_FILE, Tracker, read_metrics, versions
from qarl.metrics.validation import MEAN
from qarl.quant.convert import tied_names
from qarl.quant.experts import unstacked
from qarl.trainer.best_checkpoint import STATE, Best, better, rewrite
from qarl.trainer.policy import Policy
from qarl.trainer.resume import changed_keys, make_newest, version_notes

if TYPE_CHECKING:
    from qarl.trainer.local import LocalTrainer

_K3 = "mismatch/k3"
_AUTO = "old_log_probs"
"""The counts of `actor.old_log_probs=auto` in state.json. They are missing if the run had another source."""


class Checkpoints:
    """Writes the checkpoints of a run, and restores the trainer if the run resumes."""

    def __init__(self, trainer: LocalTrainer, checkpoint: Checkpoint | None = None) -> None:
        """Restore `trainer` from `checkpoint`, if there is one. The caller must then publish and call `resumed`."""
        self.trainer = trainer
        self.checkpoint = checkpoint
        self.folder = checkpoints_dir(trainer.config.run_dir)
        self._resume_metrics: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._saved_at = time.monotonic()
        self._saved_step = trainer.step
        self._passing: Path | None = None
        """The run's last checkpoint, if the next one replaces it."""
        self.best: Best | None = None
        if checkpoint is not None:
            with stage(f"restoring {checkpoint.folder}"):
                restore(trainer, checkpoint)
            self._saved_step = checkpoint.step
            if trainer.config.trainer.save_best:
                self.best = Best.of(checkpoint, self.folder)
            if checkpoint.folder.resolve().parent == self.folder.resolve():
                self._passing = self._passes(
                    checkpoint.folder, checkpoint.step, checkpoint.config["trainer"]
                )

    def resumed(self, tracker: Tracker) -> None:
        """Finish a resume. Call this after the first publish.

        Compare the published tensors with the checkpoint, rename later checkpoints of the run (`make_newest`), and
        restore the random generators."""
        checkpoint = self.checkpoint
        trainer = self.trainer
        if checkpoint is None:
            return
        make_newest(trainer.config.run_dir, checkpoint)
        if trainer.config.trainer.save_best:
            rewrite(self.best, trainer.config.run_dir, self.folder)
        differ = differing_tensors(checkpoint.state["published"], trainer.policy)
        self._resume_metrics = {
            "resume/step": trainer.step,
            "resume/published_equal": float(not differ),
        }
        tracker.message(
            f"resumes from {checkpoint.folder}, step {trainer.step}: weights equal by digest"
        )
        if changed := changed_keys(checkpoint.config, trainer.config):
            tracker.message(
                "changed: "
                + "; ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
            )
        for text in version_notes(checkpoint.state["versions"], _versions(trainer)):
            tracker.message(text)
        if differ:
            tracker.message(
                f"warning: {len(differ)} published tensors differ from the checkpoint's: {differ[:4]}"
            )
        if not any(entry["step"] == trainer.step for entry in read_metrics(trainer.config.run_dir)):
            tracker.log(checkpoint.metrics, step=trainer.step)
        set_rng_state(checkpoint.rng())

    def after_step(
        self, metrics: dict[str, float], tracker: Tracker, *, stopped: bool
    ) -> dict[str, float]:
        """Write a checkpoint if one is due. Return its metrics, and `resume/*` in the first step after a resume.

        `stopped`: whether a signal makes this step the last of this process."""
        extra = self._compare(metrics, tracker)
        self._metrics = metrics | extra
        best = None
        if self.trainer.config.trainer.save_best:
            best = better(metrics, self.trainer.step, self.best)
        if best is not None or self._due(stopped):
            extra |= self.save(self._metrics, tracker, best)
        return extra

    def evaluated(self, metrics: dict[str, float], tracker: Tracker) -> dict[str, float]:
        """Write a checkpoint if an evaluation after a resume, before the next step, is the best. Return its metrics."""
        if self.checkpoint is None or not self.trainer.config.trainer.save_best:
            return {}
        best = better(metrics, self.trainer.step, self.best)
        return self.save({**self.checkpoint.metrics, **metrics}, tracker, best) if best else {}

    def stopped(self, tracker: Tracker) -> None:
        """Write the checkpoint of the last step if the signal came too late for `after_step`."""
        if self._saved_step != self.trainer.step and self._due(stopped=True):
            self.save(self._metrics, tracker)

    def _due(self, stopped: bool) -> bool:
        settings = self.trainer.config.trainer
        step = self.trainer.step
        freq = settings.save_freq
        minutes = settings.save_minutes
        if freq > 0 and step % freq == 0:
            return True
        if (
            step == settings.total_training_steps
        ):  # a run that has an older checkpoint replaces it at its end
            return freq > 0 or self._passing not in (None, self._best_folder)
        return (
            stopped and (freq > 0 or minutes > 0)
        ) or 0 < minutes * 60 <= time.monotonic() - self._saved_at

    def save(
        self, metrics: dict[str, float], tracker: Tracker, best: Best | None = None
    ) -> dict[str, float]:
        """Write the checkpoint of the current step. If the disk refuses to write, report the error and continue.

        `best`: this step, if its evaluation is the best so far."""
        start = time.perf_counter()
        trainer = self.trainer
        settings = self.trainer.config.trainer
        self._saved_at = time.monotonic()
        self._saved_step = trainer.step
        folder = self.folder / f"step_{trainer.step}"
        try:
            written = save_checkpoint(
                folder,
                files=ModelFiles.of(trainer.policy.model, trainer.tokenizer),
                weights=forward_weights(trainer.policy),
                optimizer=trainer.optimizer.state_dict(),
                rng=rng_state(),
                state=training_state(trainer, metrics, best or self.best),
                adapter=trainer.policy.adapters.adapter() if trainer.policy.adapters else None,
            )
        except StorageError as error:
            tracker.message(
                f"warning: the checkpoint of step {trainer.step} failed, and the run goes on without it: {error}"
            )
            return {"checkpoint/failed": 1.0, "checkpoint/seconds": time.perf_counter() - start}
        passing = self._passing
        self._passing = self._passes(folder, trainer.step, settings.model_dump())
        try:
            former = self._take_best(best, tracker)
            spared = self._best_folder
            if settings.max_ckpt_to_keep is None:
                for old in {passing, former} - {folder, spared}:
                    if old is not None:
                        remove_folder(old)
            prune(self.folder, settings.max_ckpt_to_keep, spared=spared)
        except StorageError as error:
            tracker.message(f"warning: an old checkpoint stays, training continues: {error}")
        seconds = time.perf_counter() - start
        return {
            "checkpoint/failed": 0.0,
            "checkpoint/seconds": seconds,
            "checkpoint/mbytes": written / 1e6,
        }

    @property
    def _best_folder(self) -> Path | None:
        return self.best.folder(self.folder) if self.best else None

    def _take_best(self, best: Best | None, tracker: Tracker) -> Path | None:
        """Note a new best checkpoint. Return the former one, if nothing else keeps it."""
        if best is None:
            return None
        former = self.best
        self.best = best
        best.write(self.trainer.config.run_dir, self.folder)
        tracker.message(f"step {best.step}: best evaluation so far, {MEAN} {best.accuracy:.4g}")
        if former is None:
            return None
        settings = self.trainer.config.trainer.model_dump()
        return self._passes(former.folder(self.folder), former.step, settings)

    @staticmethod
    def _passes(folder: Path, step: int, settings: Mapping[str, Any]) -> Path | None:
        """Return `folder` if the run of `settings` saved it only because of the time or a signal. Otherwise None."""
        freq = settings.get("save_freq", -1)
        last = settings.get("total_training_steps")
        return None if freq > 0 and (step % freq == 0 or step == last) else folder

    def _compare(self, metrics: dict[str, float], tracker: Tracker) -> dict[str, float]:
        """Return the metrics `resume/*` in the first step after a resume, and {} in other steps."""
        pending = self._resume_metrics
        self._resume_metrics = {}
        if not pending or self.checkpoint is None:
            return {}
        before = self.checkpoint.metrics.get(_K3, math.nan)
        now = metrics.get(_K3, math.nan)
        pending |= {"resume/k3_before": before, "resume/k3": now}
        tracker.message(
            f"first step after the resume: {_K3} {now:.2e}, {before:.2e} in the step before"
        )
        if now > max(10 * before, 1e-4):
            tracker.message(
                "warning: trainer and engine differ more than ten times as much as before; "
                "if the next steps do too, the weights were restored or published wrongly"
            )
        return pending


def training_state(
    trainer: LocalTrainer, metrics: dict[str, float], best: Best | None = None
) -> dict[str, Any]:
    """Return the part of state.json that describes the run at this step. `best`: its best checkpoint."""
    policy = trainer.policy
    return {
        "step": trainer.step,
        "weight_version": trainer.engine.weight_version,
        "config": trainer.config.model_dump(mode="json"),
        "versions": _versions(trainer),
        "sampler": trainer.parts.sampler.state_dict(),
        **(
            {"loss_scale": trainer.optimizer.loss_scale.state_dict()}
            if trainer.optimizer.loss_scale.active
            else {}
        ),
        **(
            {_AUTO: trainer.source.schedule.skipping.state_dict()}
            if trainer.config.actor.old_log_probs == "auto"
            else {}
        ),
        **({STATE: asdict(best)} if best else {}),
        "train_prompts": prompts_digest(trainer.parts.train_prompts),
        "inputs": trainer.parts.record,
        "weights": tensors_digest(forward_weights(policy)),
        "published": published_digests(policy),
        "metrics": metrics,
    }


def restore(trainer: LocalTrainer, checkpoint: Checkpoint) -> None:
    """Restore policy, optimizer, data position and step of a new trainer, but not the random generators.

    Raise UserError if the checkpoint is damaged, or if its model, optimizer or data are different."""
    state = checkpoint.state
    if state["train_prompts"] != prompts_digest(trainer.parts.train_prompts):
        raise _other_prompts(trainer)
    _load_weights(trainer.policy, checkpoint)
    trainer.optimizer.load_state_dict(checkpoint.optimizer())
    if tensors_digest(forward_weights(trainer.policy)) != state["weights"]:
        raise damaged(checkpoint.folder, "the restored weights differ from the saved ones")
    if trainer.policy.adapters and (
        differ := differing_tensors(state["published"], trainer.policy)
    ):
        raise UserError(
            f"{len(differ)} tensors of the base differ from those that the adapter was trained on",
            where=f"{trainer.config.model.path}: {differ[0]}",
            why="the model's files, or the quantizer, have changed since the checkpoint was written",
            fix="restore the old model and version of QaRL, or start fresh with a new name=...",
        )
    trainer.parts.sampler.load_state_dict(state["sampler"])
    if trainer.optimizer.loss_scale.active:
        trainer.optimizer.loss_scale.load_state_dict(state["loss_scale"])
    if trainer.config.actor.old_log_probs == "auto" and _AUTO in state:
        trainer.source.schedule.skipping.load_state_dict(state[_AUTO])
    trainer.step = checkpoint.step


def _other_prompts(trainer: LocalTrainer) -> UserError:
    """Return the error for a checkpoint of other prompts. One with a record of its inputs was compared before."""
    why = "the files, the tokenizer or the chat template have changed since the checkpoint was written"
    fix = "restore the old files, tokenizer and chat template, or start fresh with a new name=..."
    messages = (prompt.messages for prompt in trainer.parts.train_prompts)
    variables = trainer.config.data.apply_chat_template_kwargs
    if dates := written_dates(trainer.tokenizer, messages, variables):
        why += f"; the template writes today's date ({', '.join(dates.values())})"
        fix += (
            f". If only the date differs: {fixed_date(dates)}, but with the date of the run's start"
        )
    what = "the training prompts differ from those of the checkpoint"
    return UserError(what, where="data.train_files", why=why, fix=fix)


def refuse_other_model(checkpoint: Checkpoint, model_files: Sequence[Path]) -> None:
    """Raise UserError if tensors of the checkpoint have other shapes than those of the same names in `model_files`, the
    safetensors files of `model.path`. Nothing but the headers is read."""
    saved = header_shapes(weight_files(checkpoint.folder))
    there = header_shapes(model_files)
    differing = [name for name in saved if name in there and saved[name] != there[name]]
    if differing:
        raise _other_model(checkpoint, min(differing))


@torch.no_grad()
def _load_weights(policy: Policy, checkpoint: Checkpoint) -> None:
    ours = dict(forward_weights(policy))
    saved = header_shapes(weight_files(checkpoint.folder))
    now = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    differing = {name for name, _ in now.items() ^ saved.items()}
    if differing:
        raise _other_model(checkpoint, min(differing))
    for name, tensor in read_tensors(checkpoint.folder):
        ours[name].copy_(tensor)


def _other_model(checkpoint: Checkpoint, name: str) -> UserError:
    return UserError(
        "the checkpoint belongs to a different model",
        where=f"{checkpoint.folder}: {name}",
        why="this tensor is only in the checkpoint, or only in the model, or has different shapes",
        fix="set model.path to the model that the run started with",
    )


def forward_weights(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """Return the BF16 tensors (not copies) that a checkpoint has, with their names: the adapter if there is one, else
    those of the forward, without a tied lm_head."""
    if policy.adapters is not None:
        return list(policy.adapters.tensors().items())
    tied = tied_names(policy.model)
    return list(
        unstacked(
            (name, tensor) for name, tensor in policy.model.state_dict().items() if name not in tied
        )
    )


def differing_tensors(published: dict[str, str], policy: Policy) -> list[str]:
    """Return the names of published tensors whose digest in `policy` differs from `published` (name -> digest). Tensors
    that only one of the two has are included."""
    now = published_digests(policy)
    return sorted(
        name for name in now.keys() | published.keys() if now.get(name) != published.get(name)
    )


def published_digests(policy: Policy) -> dict[str, str]:
    """Return the digests of the tensors that `policy` publishes, by name. With adapters these are those of the base,
    which are computed once, because it is frozen."""
    if policy.adapters is None or not policy.base_digests:
        digests = {
            name: tensor_digest(tensor) for name, tensor in policy.published_tensors(stacks=False)
        }
        if policy.adapters is None:
            return digests
        policy.base_digests.update(digests)
    return policy.base_digests


def rng_state() -> dict[str, Any]:
    """Return the states of the global random generators, in types that `torch.load(weights_only=True)` reads."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _versions(trainer: LocalTrainer) -> dict[str, Any]:
    """Return the versions that the run wrote at its start, or if its file is damaged those of now."""
    try:
        path = trainer.config.run_dir / VERSIONS_FILE
        written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return versions()
    return written
