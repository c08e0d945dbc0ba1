"""Reads the log that verl writes during a run, and logs its steps as those of QaRL.

verl's logger writes one line `{"step": n, "data": {...}}` per step to `VERL_FILE_LOGGER_PATH`
(verl/utils/tracking.py, 0.9.1). During the run a thread reads this file and logs each step through QaRL's tracker
(`MetricsFollower`). A metric that the local backend also logs gets the local backend's name. `trainer.logger` chooses
QaRL's loggers, not verl's.

A step that is saved has a line before its own (`qarl.verl.saved_rows`), which is logged if its own never comes: at the
end of the run, or by the run that resumes, if the command was killed. That run also logs what the thread had not read.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.run_folder import RunFolder
from qarl.checkpoint.storage import METRICS_FILE, StorageError, read_lines, writing
from qarl.config import Config
from qarl.console import say
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker, is_step, read_metrics
from qarl.metrics.validation import sources_metrics
from qarl.report.page import update_report
from qarl.verl.saving import UNFINISHED

RENAMED = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/update_actor": "timing_s/update",
    "timing_s/update_weights": "timing_s/publish",
    "timing_s/testing": "timing_s/eval",
}
"""Maps verl's metric names to the local backend's names, for quantities that both backends log."""

_OURS = tuple(
    f"actor/{group}/"
    for group in ("correction", "mismatch", "publish", "tokens", "error_tokens", "rollout")
)
_FIGURE = re.compile(
    r"val-core/(?P<source>.*)/(?P<kind>acc|reward)/mean@(?P<answers>\d+)", re.DOTALL
)


def our_names(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one step under QaRL's names. A metric that QaRL has no name for keeps verl's name."""
    # verl adds the prefix to every metric of an actor.
    plain = {
        name.removeprefix("actor/") if name.startswith(_OURS) else name: value
        for name, value in metrics.items()
    }
    values = {RENAMED.get(name, name): as_logged(value) for name, value in plain.items()}
    named = {name: value for name, value in values.items() if value is not None}
    # A trainer other than QaRL's (`trainer.v1.trainer_mode`) has only verl's own figures of an evaluation.
    return sources_metrics(verls_figures(named)) | named


def as_logged(value: Any) -> float | None:
    """Return a value of verl's log as a number, or None if it is none. orjson, which writes the log, writes NaN and
    infinities as null."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        return (
            float(value)
            if value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")
            else None
        )
    return value if isinstance(value, int | float) else None


def verls_figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the figure of each data source from verl's metrics of an evaluation. If verl has an accuracy and a reward,
    it is the accuracy. For several numbers of answers it is that of the largest number."""
    figures: dict[str, tuple[tuple[bool, int], float]] = {}
    for name, value in metrics.items():
        if match := _FIGURE.fullmatch(name):
            rank = (match["kind"] == "acc", int(match["answers"]))
            if rank > figures.get(match["source"], ((False, 0), 0.0))[0]:
                figures[match["source"]] = (rank, value)
    return {source: value for source, (_, value) in figures.items()}


class MetricsFollower:
    """Logs the lines that verl adds to `path`, in a thread that runs from `__enter__` to `__exit__`.

    `start`: `time.perf_counter()` at the program's start. `start_step`: the step after which a resumed run continues.
    `last_step`: the last step of which verl has logged anything, whether that could be stored or not.
    """

    def __init__(self, config: Config, path: Path, start: float, *, start_step: int = 0) -> None:
        self.config = config
        self.path = path
        self.start = start
        self.start_step = start_step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.last_step = start_step
        self._offset = 0
        self._lost: StorageError | None = None
        self._unfinished: Mapping[str, Any] | None = None
        """The line of a step that verl has saved, and not logged yet."""

    def __enter__(self) -> MetricsFollower:
        trainer = self.config.trainer
        config = self.config.model_dump()
        left = self._left()
        steps: dict[str, Any] = {
            "total_steps": trainer.total_training_steps,
            "start_step": self.start_step,
        }
        self._tracker = Tracker(self.config.run_dir, trainer.logger, config_dict=config, **steps)
        for entry in left:
            self._try(self._log, entry)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        self._thread.start()
        return self

    def _left(self) -> list[Mapping[str, Any]]:
        """Return the lines that the part of the run before has left: one for each step up to `start_step` that is not
        in metrics.jsonl, after those that are."""
        has_metrics = (self.config.run_dir / METRICS_FILE).is_file()
        logged = read_metrics(self.config.run_dir) if has_metrics else []
        last = max((entry["step"] for entry in logged), default=-1)
        found = {
            entry["step"]: entry
            for entry in read_lines(self.path)
            if is_step(entry) and last < entry["step"] <= self.start_step
        }
        return [found[step] for step in sorted(found)]

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        if (entry := self._unfinished) is not None:
            self._try(self._log, entry)
        self._tracker.close()

    @property
    def folder(self) -> RunFolder:
        """The run folder as it was when verl started."""
        return self._tracker.folder

    @property
    def problem(self) -> UserError | None:
        """The first error while storing metrics or of a logger. It does not stop the training."""
        return self._tracker.problem or self._lost

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            self._read()

    def _read(self) -> None:
        """Log all complete new lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            lost = StorageError(
                f"{self.path} could not be read",
                why=error.strerror,
                fix="leave verl's log where it is",
            )
            self._lost = self._lost or lost
            return
        for line in new.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            self._try(self._take, line)
            self._offset += len(line)

    def _try(self, log: Callable[[Any], None], what: Any) -> None:
        """Log `what`. Keep the first StorageError for `problem`. Print a warning for other errors."""
        try:
            log(what)
        except StorageError as error:
            self._lost = self._lost or error
        except Exception as error:  # later lines must still be logged
            say(
                f"warning: a line of {self.path} was not logged ({type(error).__name__}: {str(error)[:300]})"
            )

    def _take(self, line: bytes) -> None:
        """Log a line, or keep it if verl has not ended its step yet."""
        entry = json.loads(line)
        if entry["step"] == self.start_step + 1:
            entry["data"]["startup/seconds_to_first_step"] = time.perf_counter() - self.start
        self._unfinished = entry if UNFINISHED in entry["data"] else None
        if self._unfinished is None:
            self._log(entry)

    def _log(self, entry: Mapping[str, Any]) -> None:
        self.last_step = max(self.last_step, entry["step"])
        metrics = our_names(entry["data"])
        metrics.pop(UNFINISHED, None)
        self._tracker.log(metrics, step=entry["step"])
        update_report(self.config, entry["step"])
