"""The end of a run of either backend. It writes the last files even if an earlier step of the run failed.

It tries to write the summary, the export, the summary again, plots and the report, in this order. A failure of one
does not stop the next. At the end, the first error of the run is raised. Later errors are only printed.

A run is finished once it has made all its steps and its export. If only plots or the report failed, the exit code
reports the failure, but a resume does not train again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qarl.checkpoint.resumable import list_checkpoints
from qarl.checkpoint.storage import EXPORT, StorageError, checkpoints_dir, write_json, writing
from qarl.console import say
from qarl.errors import UserError
from qarl.metrics.plots import plot_run
from qarl.report.page import write_report


class Ending:
    """Collects the errors at the end of a run. `failure`: the first error, or None."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch an error in this block. It becomes `failure` if it is the run's first error. Otherwise print it."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure = error
            else:
                say(f"error: {error if isinstance(error, UserError) else f'{type(error).__name__}: {error}'}")

    def in_words(self) -> str | None:
        """Return the first error as one line for the summary, or None if there is no error."""
        failure = self.failure
        if isinstance(failure, StorageError):
            return f"{failure.what}: {failure.why}"
        return None if failure is None else f"{type(failure).__name__}: {failure}"


def finish_run(
    run_dir: Path,
    summary: dict[str, Any],
    failure: BaseException | None,
    problem: UserError | None,
    *,
    step: int,
    total: int,
    save: Callable[[Path], Path] | None,
    plots: bool,
    report: bool,
) -> dict[str, Any]:
    """Write summary, export, plots and report of a run after `step` of `total` steps. Return the summary.

    `failure`: the error that ended the training. `problem`: the error of a logger that failed during the run. `save`: a
    function that writes the export to a folder. If there was an error, raise the first of: `failure`, an error of this
    function, `problem`.
    """
    ending = Ending(failure)

    def write(*, finished: bool) -> None:
        summary.update(finished=finished, failed=ending.in_words())
        with ending.attempt():
            write_json(run_dir / "summary.json", summary)

    write(finished=False)
    if save is not None:
        with ending.attempt():
            try:
                summary["checkpoint"] = str(save(run_dir / EXPORT))
            except StorageError as error:
                raise not_exported(run_dir, step, error) from error
    write(finished=ending.failure is None and step >= total)
    if plots:
        with ending.attempt(), writing(run_dir / "plots"):
            plot_run(run_dir)
    if report:
        with ending.attempt():
            write_report(run_dir)
    if problem is not None:
        with ending.attempt():
            raise problem
    summary["failed"] = ending.in_words()
    if ending.failure is not None:
        with suppress(StorageError):  # write the summary again, because the file may lack the last error
            write_json(run_dir / "summary.json", summary)
        raise ending.failure
    return summary


def not_exported(run_dir: Path, step: int, error: StorageError) -> StorageError:
    """Return the error for a failed export. It says which files of the run exist and how to get the export."""
    there, again = "there is no checkpoint, so the weights are lost", "train again, with trainer.save_freq=N"
    if saved := list_checkpoints(checkpoints_dir(run_dir)):
        there, again = f"the newest checkpoint is {saved[0][1]}", "the same command then resumes and exports"
    return StorageError(
        f"the model after step {step} could not be exported",
        where=error.where,
        why=f"{error.what}: {error.why}; {there}; metrics and summary are in {run_dir}",
        fix=f"{error.fix}; {again}",
    )
