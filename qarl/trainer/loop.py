"""The loop of a local run, from its first publish to its summary. It evaluates, writes checkpoints and obeys signals.

The algorithm is in `qarl.trainer.local`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.checkpoint.model_files import MAX_SHARD_BYTES
from qarl.checkpoint.resumable import Checkpoint
from qarl.checkpoint.storage import EXPORT, METRICS_FILE, check_room
from qarl.checks.room import check_run_room
from qarl.config import Config, write_resolved
from qarl.console import stage
from qarl.metrics.tracker import Tracker, read_metrics, write_versions
from qarl.metrics.validation import MEAN
from qarl.progress import live
from qarl.report.page import update_report
from qarl.trainer.checkpoints import Checkpoints, refuse_other_model
from qarl.trainer.finish import finish_run
from qarl.trainer.local import LocalTrainer
from qarl.trainer.prepare import RunParts, check_inputs, load_parts, prepare_run
from qarl.trainer.probe import probe
from qarl.trainer.repeat import keys_that_resume
from qarl.trainer.resume import open_run
from qarl.trainer.stop import Stop

_SKIPPED = "because the gradient was NaN or Inf; if this continues, lower optim.lr or look at mismatch/abs_max"
_OVERFLOWED = (
    "because the gradient overflowed in FP16; the loss scale is now {actor/loss_scale:.0f}"
)


def train_in_run_folder(config: Config, *, started: float) -> dict[str, Any]:
    """Make all checks and load the weights. Only then change the run folder, and call `train`, with the checkpoint if
    the run resumes."""
    inputs = check_inputs(config)
    parts: list[RunParts] = []

    def prepare(checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            refuse_other_model(checkpoint, inputs.weight_files)
        check_run_room(config, inputs)
        parts.append(load_parts(config, inputs))

    with open_run(config, inputs.record, prepare) as checkpoint:
        write_resolved(config, config.run_dir / "config.yaml")
        return train(config, started=started, checkpoint=checkpoint, parts=parts[0])


def train(
    config: Config,
    *,
    started: float | None = None,
    checkpoint: Checkpoint | None = None,
    parts: RunParts | None = None,
) -> dict[str, Any]:
    """Run `config` to its end or to Ctrl-C. Return the summary, which is also written to `summary.json`.

    `started`: `time.perf_counter()` at the start of the program. The summary's seconds count from that time.
    `checkpoint`: the checkpoint to resume from (`qarl.trainer.resume.open_run`). `parts`: what `prepare_run` returned,
    or None to call it here.
    """
    start = time.perf_counter() if started is None else started
    parts = parts or prepare_run(config)
    run_dir = config.run_dir
    write_versions(run_dir)
    trainer = LocalTrainer(config, parts)
    with trainer.engine, Stop() as stop:
        return run_and_keep(trainer, Checkpoints(trainer, checkpoint), stop, start)


def run_and_keep(
    trainer: LocalTrainer, checkpoints: Checkpoints, stop: Stop, start: float
) -> dict[str, Any]:
    """Publish and train. Then write export, summary and plots, even after an error. Return the summary.

    After a KeyboardInterrupt only the summary is written, because the weights may be those of half a step."""
    config = trainer.config
    run_dir = trainer.config.run_dir
    failure: BaseException | None = None
    with stage("publishing the weights to the engine"):
        report = trainer.publish()
    if config.trainer.save_final:
        # The export holds the same bytes as a publish. If the disk has no room for them, training would be wasted.
        largest = min(report.bytes, MAX_SHARD_BYTES)
        check_room(run_dir / EXPORT, report.bytes, largest_file=largest)
    total = config.trainer.total_training_steps
    start_step = trainer.step
    with Tracker(
        run_dir, config.trainer.logger, total, config.model_dump(), start_step=start_step
    ) as tracker:
        try:
            tracker.message(trainer.policy.report)
            checkpoints.resumed(tracker)
            with stage("comparing the log-probs of trainer and engine"):
                metrics = probe(trainer)
            tracker.message(metrics)
            run_steps(trainer, checkpoints, tracker, stop, start)
        except BaseException as error:
            failure = error
    interrupted = isinstance(failure, KeyboardInterrupt)
    stop.work = (
        None if interrupted else "the training has ended, and its last files are being written"
    )
    facts = {
        "quant_scheme": config.quant.scheme,
        "quant_kernels": config.quant.kernels,
        "quant_align": trainer.policy.align,
        "interrupted": bool(stop) or interrupted,
        "quantized_ratio": report.quantized_ratio,
        "seconds": time.perf_counter() - start,
    }

    def save(folder: Path) -> Path:
        return trainer.policy.save(folder, trainer.tokenizer)

    not_saved = None if config.trainer.save_final else "trainer.save_final=false"
    if failure is not None and not trainer.step:
        not_saved = "no step was trained"
    elif interrupted:
        not_saved = (
            "the run was interrupted within a step, and its weights may be those of half a step"
        )
    return finish_run(
        tracker.folder,
        facts,
        failure,
        tracker.problem,
        step=trainer.step,
        total=total,
        save=not_saved or save,
        plots=config.trainer.plots and not interrupted,
        report=config.trainer.report and not interrupted,
        keys=keys_that_resume(config),
    )


def run_steps(
    trainer: LocalTrainer, checkpoints: Checkpoints, tracker: Tracker, stop: Stop, start: float
) -> None:
    """Evaluate before training (step 0), or after the step of the checkpoint, if the run ended in that evaluation. Then
    train until the last step, or until `stop` is true."""
    settings = trainer.config.trainer
    total = settings.total_training_steps
    if settings.val_before_train and not trainer.step:
        with stage(f"evaluating {len(trainer.parts.val_prompts)} prompts before the first step"):
            metrics = trainer.evaluate()
        tracker.log(metrics, step=0)
    if trainer.step and lacks_evaluation(trainer):
        count = len(trainer.parts.val_prompts)
        with stage(
            f"evaluating {count} prompts after step {trainer.step}, which has no figures yet"
        ):
            metrics = trainer.evaluate()
        metrics |= checkpoints.evaluated(metrics, tracker)
        tracker.log(metrics, step=trainer.step)
    trainer.timer.pop()
    while trainer.step < total and not stop:
        stop.work = f"stopping after step {trainer.step + 1}"
        with live.phase(f"step {trainer.step + 1}/{total}"):
            metrics = trainer.train_step()
        if trainer.step == 1:
            metrics["startup/seconds_to_first_step"] = time.perf_counter() - start
        last = trainer.step == total or bool(stop)
        if is_evaluated(trainer, last=last):
            try:
                with live.phase(f"evaluating after step {trainer.step}"):
                    metrics |= trainer.evaluate()
            except Exception:
                with suppress(Exception):  # the evaluation's error is the one to see
                    keep_step(trainer, checkpoints, tracker, stop, metrics)
                raise
        keep_step(trainer, checkpoints, tracker, stop, metrics)
        update_report(trainer.config, trainer.step)
        for text in trainer.warnings:
            tracker.message(f"step {trainer.step}: {text}")
        if metrics["actor/skipped_steps"]:
            why = _OVERFLOWED.format(**metrics) if "actor/loss_scale" in metrics else _SKIPPED
            tracker.message(
                f"step {trainer.step}: {metrics['actor/skipped_steps']:.0f} updates skipped, {why}"
            )
    if stop:
        checkpoints.stopped(tracker)


def is_evaluated(trainer: LocalTrainer, *, last: bool) -> bool:
    """Return whether an evaluation follows the step that was made. `last`: whether it is the last one."""
    test_freq = trainer.config.trainer.test_freq
    return bool(trainer.parts.val_prompts) and (
        last or (test_freq > 0 and trainer.step % test_freq == 0)
    )


def lacks_evaluation(trainer: LocalTrainer) -> bool:
    """Return whether the run has ended in the evaluation of the step that it resumes after: its metrics have the step
    without a figure, or, after the last step, no figure at all."""
    is_last = trainer.step >= trainer.config.trainer.total_training_steps
    if not is_evaluated(trainer, last=is_last):
        return False
    run_dir = trainer.config.run_dir
    entries = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    of_step = [entry for entry in entries if entry["step"] == trainer.step]
    return not any(MEAN in entry for entry in of_step) and (is_last or bool(of_step))


def keep_step(
    trainer: LocalTrainer,
    checkpoints: Checkpoints,
    tracker: Tracker,
    stop: Stop,
    metrics: dict[str, float],
) -> None:
    """Write the checkpoint of a finished step if one is due, and log the step's `metrics`, to which this adds."""
    tracker.folder.check()  # a checkpoint would make the folder again
    metrics |= trainer.timer.pop()
    # Look at `stop` again, because the signal may have come during the evaluation.
    metrics |= checkpoints.after_step(metrics, tracker, stopped=bool(stop))
    tracker.log(metrics, step=trainer.step)
