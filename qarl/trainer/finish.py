"""The end of a run of either backend. It writes the last files even if an earlier step of the run failed.

What took long comes first, and words come last: the export, then the summary, plots and the report. A failure of one
does not stop the next. At the end, the first error of the run is raised. Later errors are only printed, but what the
same full or read-only disk has kept from being written is part of the first error.

A run is finished once it has made all its steps and its export. If only summary, plots or the report failed, the exit
code reports the failure, but a resume does not train again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qarl.checkpoint.export_folder import record_step, step_of, why_foreign
from qarl.checkpoint.read_weights import newest_checkpoint
from qarl.checkpoint.run_folder import RunFolder
from qarl.checkpoint.storage import (
    EXPORT,
    METRICS_FILE,
    SUMMARY_FILE,
    StorageError,
    free_name,
    write_json,
    writing,
)
from qarl.console import note, say
from qarl.errors import UserError, in_one_line
from qarl.metrics.plots import plot_run
from qarl.metrics.summary import summarize
from qarl.metrics.tracker import read_metrics
from qarl.report.damage import damage
from qarl.report.page import write_report
from qarl.trainer.taken_names import PLOTS


class NotExported(StorageError):
    """The disk refused the export. `left`: the checkpoint that there is, or that there is none. `again`: how to get the
    export. `keys`: with which keys a repeated command resumes (`qarl.trainer.repeat`)."""

    def __init__(self, run_dir: Path, step: int, error: StorageError, keys: str) -> None:
        self.left = "there is no checkpoint, so the weights are lost"
        self.again = "train again, with trainer.save_freq=N"
        if newest := newest_checkpoint(run_dir):
            saved_step, folder = newest
            self.left = f"the newest checkpoint is {folder}"
            command = shlex.join(["qarl", "export", f"run={run_dir}", f"step={saved_step}"])
            self.again = (
                f"with room for a checkpoint and the export the same command {keys}resumes and exports, and "
                f"`{command} output=FOLDER` exports this checkpoint to another disk"
            )
        super().__init__(
            f"the model after step {step} could not be exported",
            where=error.where,
            why=f"{error.what}: {error.why}; {self.left}",
            fix=f"{error.fix}; {self.again}",
            number=error.number,
        )


class Ending:
    """Collects the errors at the end of a run. `failure`: the first error, or None."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure
        self._messages: set[str] = set()
        self._unwritten: list[StorageError] = []
        if isinstance(failure, SystemExit):  # its exit code, 0 perhaps, would be that of the run
            self.failure = RuntimeError(f"something in the run called sys.exit({failure.code!r})")
            self.failure.__cause__ = failure

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch an error in this block. It becomes `failure` if it is the run's first error. Otherwise print it, but
        not twice: what several files lack, each says. A later error that has the cause of the first is not printed;
        `whole_failure` names it."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure = error
            elif isinstance(error, StorageError) and error.has_cause_of(self.failure):
                self._unwritten.append(error)
            elif str(error) not in self._messages:
                say_error(error)
            self._messages.add(str(error))

    def whole_failure(self) -> BaseException | None:
        """Return `failure`. If it is of the disk, it says what else the disk has refused for the same reason."""
        first = self.failure
        if not isinstance(first, StorageError) or not self._unwritten:
            return first
        reasons = [first.why or ""]
        fixes = [first.fix or ""]
        for error in self._unwritten:
            reasons.append(f"for the same reason {error.what}")
            if isinstance(error, NotExported):
                reasons.append(error.left)
                fixes.append(error.again)
        whole = StorageError(
            first.what,
            where=first.where,
            why="; ".join(dict.fromkeys(reasons)),
            fix="; ".join(fixes),
            number=first.number,
        )
        whole.__cause__ = first
        return whole

    @property
    def says_there_is_no_export(self) -> bool:
        """Whether `whole_failure` says it."""
        return any(isinstance(error, NotExported) for error in (self.failure, *self._unwritten))

    def in_words(self) -> str | None:
        """Return the first error as one line for the summary, or None if there is no error."""
        return None if self.failure is None else in_words(self.failure)


def finish_run(
    folder: RunFolder,
    facts: Mapping[str, Any],
    failure: BaseException | None,
    problem: UserError | None,
    *,
    step: int,
    total: int,
    save: Callable[[Path], Path] | str,
    plots: bool,
    report: bool,
    keys: str = "",
) -> dict[str, Any]:
    """Write export, summary, plots and report of a run after `step` of `total` steps. Return the summary.

    `facts`: what the summary has beside the figures of the metrics. `failure`: the error that ended the training.
    `problem`: the first error of metrics and loggers during the run. `save`: a function that writes the export to a
    folder, or why there is no export. `keys`: with which keys a repeated command resumes. If there was an error, raise
    the first of: `failure`, the loss of the run folder, that of the export, `problem`, that of the summary, of the
    plots, of the report.

    If the run folder is lost, export and summary are written to a new folder of its name, or of its name with a number.
    """
    ending = Ending(failure)
    run_dir = _home(folder, ending)
    is_lost = folder.is_lost
    summary: dict[str, Any] = {"steps": step, **facts, "finished": False}

    def write() -> None:
        summary["failed"] = ending.in_words()
        write_json(run_dir / SUMMARY_FILE, summary)

    try:
        with ending.attempt():
            _export(run_dir, step, save, summary, keys)
        summary["finished"] = ending.failure is None and step >= total
        if problem is not None and not (is_lost and isinstance(problem, StorageError)):
            with ending.attempt():
                raise problem
        # What has no metrics any more has its error already.
        has_metrics = ending.failure is None or (run_dir / METRICS_FILE).is_file()
        if has_metrics:
            with ending.attempt():
                for text in damage(run_dir):
                    note(text)
                summary |= summarize(read_metrics(run_dir))
                summary["steps"] = step  # the metrics may lack some
        with ending.attempt():
            write()
        if plots and has_metrics:
            with ending.attempt(), writing(run_dir / PLOTS):
                plot_run(run_dir)
        if report and has_metrics:
            with ending.attempt():
                write_report(run_dir)
        if not is_lost:
            with ending.attempt():
                _check_what_is_there(folder, summary)
    except BaseException:  # an interrupt: what was done and what failed is written all the same
        if ending.failure is not None:
            say_error(ending.failure)
        summary["interrupted"] = True
        if "checkpoint" not in summary:
            _say_no_export(run_dir, step, summary)
        with suppress(Exception):
            write()
        raise
    if ending.failure is not None:
        with suppress(Exception):  # the file may lack the last error
            write()
        if is_lost:
            export = ", its export among them," if "checkpoint" in summary else ""
            note(f"the last files of the run{export} are in {run_dir}")
            _say_how_to_move_back(folder)
        elif "checkpoint" in summary:
            note(_what_is_left(run_dir, step, total, summary["checkpoint"]))
        failure = ending.whole_failure()
        if "not_exported" in summary and not ending.says_there_is_no_export:
            note(f"there is no export: {summary['not_exported']}")
        assert failure is not None
        raise failure
    return summary


def _say_no_export(run_dir: Path, step: int, summary: dict[str, Any]) -> None:
    """Say, and write into `summary`, why an interrupted run has no export of its last step."""
    why = summary.get("not_exported") or _beside(
        run_dir, "the run was interrupted before it was written"
    )
    summary["not_exported"] = why
    note(f"there is no export of step {step}: {why}")


def _what_is_left(run_dir: Path, step: int, total: int, export: str) -> str:
    """Return where the model of a failed run and its newest checkpoint are."""
    text = f"the model after step {step} of {total} was exported to {export}"
    newest = newest_checkpoint(run_dir)
    return f"{text}; its newest checkpoint is {newest[1]}" if newest else text


def _home(folder: RunFolder, ending: Ending) -> Path:
    """Return the folder for the last files: that of the run, or if it is lost a folder that does not exist."""
    if not folder.is_lost:
        return folder.path
    if ending.failure is None or isinstance(ending.failure, OSError | StorageError):
        ending.failure = None  # a file that could not be written is what the loss has caused
        with ending.attempt():
            folder.check()
    return free_name(folder.path)


def _say_how_to_move_back(folder: RunFolder) -> None:
    """Say with which commands the run folder gets its name back. `mv` alone would put it into what has the name now."""
    moved = folder.moved_to
    if moved is None:
        return
    away = shlex.join(["mv", str(folder.path), str(free_name(folder.path))])
    back = shlex.join(["mv", str(moved), str(folder.path)])
    note(f"the run folder is now {moved}; before you repeat the command: {away} && {back}")


def _export(
    run_dir: Path,
    step: int,
    save: Callable[[Path], Path] | str,
    summary: dict[str, Any],
    keys: str,
) -> None:
    """Write the export, and into `summary` where it is or why there is none.

    If something that is no export has its name, leave that alone, write the export beside it and raise UserError."""
    if isinstance(save, str):
        summary["not_exported"] = _beside(run_dir, save)
        return
    output = run_dir / EXPORT
    foreign = why_foreign(output) if output.exists() else None
    if foreign is not None:
        output = free_name(output)
    try:
        saved = save(output)
    except Exception as error:
        summary["not_exported"] = _beside(run_dir, in_words(error))
        if isinstance(error, StorageError):
            raise NotExported(run_dir, step, error, keys) from error
        raise
    summary["checkpoint"] = str(saved)
    record_step(saved, step)
    if foreign is not None:
        raise UserError(
            f"{run_dir / EXPORT} is not an export of QaRL, so the model was exported to {output}",
            why=foreign,
            fix=f"move {run_dir / EXPORT} away and rename {output} to {EXPORT}",
        )


def _beside(run_dir: Path, why: str) -> str:
    """Return `why` there is no export, and of which step the one is that an earlier part of the run has left."""
    output = run_dir / EXPORT
    step = step_of(output)
    return why if step is None else f"{why}; {output} is still the one of step {step}"


def _check_what_is_there(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Raise StorageError if the run folder or its export has gone meanwhile. `summary` then claims neither."""
    export = summary.get("checkpoint")
    if export is None or (Path(export) / "config.json").is_file():
        folder.check()
        return
    summary["finished"] = False
    summary["not_exported"] = (
        f"{summary.pop('checkpoint')} was deleted or moved after it was written"
    )
    folder.check()
    raise StorageError(
        f"the export {export} was deleted or moved before the run had ended",
        fix="move it back, or repeat the command or `qarl export`, if the run has a checkpoint",
    )


def say_error(error: BaseException) -> None:
    say(f"error: {error if isinstance(error, UserError) else in_one_line(error)}")


def in_words(error: BaseException) -> str:
    """Return an error as one line for the summary."""
    if isinstance(error, StorageError):
        return f"{error.what}: {error.why}"
    return in_one_line(error)
