"""Records a verl run in QaRL's run folder.

verl's logger writes one line `{"step": n, "data": {...}}` per step to `VERL_FILE_LOGGER_PATH`
(verl/utils/tracking.py). During the run a thread reads this file and logs each step through QaRL's tracker. A metric
that the local backend also logs gets the local backend's name. `trainer.logger` chooses QaRL's loggers, not verl's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import StorageError, writing
from qarl.config import Config
from qarl.console import say
from qarl.errors import UserError
from qarl.metrics.tracker import Tracker
from qarl.report.page import update_report

RENAMED = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/update_actor": "timing_s/update",
    "timing_s/update_weights": "timing_s/publish",
    "timing_s/testing": "timing_s/eval",
}
"""Maps verl's metric names to the local backend's names, for quantities that both backends log."""

_OURS = tuple(f"actor/{group}/" for group in ("correction", "mismatch", "publish", "tokens", "error_tokens", "rollout"))
_ACCURACY = re.compile(r"val-core/.*/(acc|reward)/mean@1$")


def our_names(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one step under QaRL's names. A metric that QaRL has no name for keeps verl's name."""
    # verl adds the prefix to every metric of an actor.
    plain = {name.removeprefix("actor/") if name.startswith(_OURS) else name: value for name, value in metrics.items()}
    named = {RENAMED.get(name, name): value for name, value in plain.items() if isinstance(value, int | float)}
    accuracies = [value for name, value in named.items() if _ACCURACY.match(name)]
    if len(accuracies) == 1:  # for several data sources verl logs one accuracy each, but not their sizes
        named["val/accuracy"] = accuracies[0]
    return named


class MetricsFollower:
    """Logs the lines that verl adds to `path`, in a thread that runs from `__enter__` to `__exit__`.

    `start`: `time.perf_counter()` at the program's start. `start_step`: the step after which a resumed run continues.
    """

    def __init__(self, config: Config, path: Path, start: float, *, start_step: int = 0) -> None:
        self.config, self.path, self.start, self.start_step = config, path, start, start_step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._offset = 0
        self._lost: StorageError | None = None

    def __enter__(self) -> MetricsFollower:
        trainer, config = self.config.trainer, self.config.model_dump()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        steps: dict[str, Any] = {"total_steps": trainer.total_training_steps, "start_step": self.start_step}
        self._tracker = Tracker(self.config.run_dir, trainer.logger, config_dict=config, **steps)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._tracker.close()

    @property
    def problem(self) -> UserError | None:
        """The first error while storing metrics or of a logger. It does not stop the training."""
        return self._tracker.problem or self._lost

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            self._read()

    def _read(self) -> None:
        """Log all complete new lines. Keep the first StorageError for `problem`. Print a warning for other errors."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        for line in new.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            try:
                self._log(json.loads(line))
            except StorageError as error:
                self._lost = self._lost or error
            except Exception as error:  # later lines must still be logged
                say(f"warning: a line of {self.path} was not logged ({type(error).__name__}: {str(error)[:300]})")
            self._offset += len(line)

    def _log(self, entry: Mapping[str, Any]) -> None:
        metrics = our_names(entry["data"])
        if entry["step"] == self.start_step + 1:
            metrics["startup/seconds_to_first_step"] = time.perf_counter() - self.start
        self._tracker.log(metrics, step=entry["step"])
        update_report(self.config, entry["step"])
