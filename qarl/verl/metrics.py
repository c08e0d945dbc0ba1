"""Records a verl run in QaRL's run folder.

verl's logger writes one line `{"step": n, "data": {...}}` per step to `VERL_FILE_LOGGER_PATH`
(verl/utils/tracking.py). During the run a thread reads this file and logs each step through QaRL's tracker. A metric
that the local backend also logs gets the local backend's name. `trainer.logger` chooses QaRL's loggers, not verl's.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qarl.checkpoint.storage import StorageError, writing
from qarl.config import Config
from qarl.console import say
from qarl.metrics.plots import plot_run
from qarl.metrics.tracker import Ending, Tracker, read_metrics, write_summary
from qarl.report.page import update_report, write_report

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
    named: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            # verl adds this prefix to every metric of an actor.
            plain = name.removeprefix("actor/") if name.startswith(_OURS) else name
            named[RENAMED.get(plain, plain)] = value
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
        trainer = self.config.trainer
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        self._tracker = Tracker(
            self.config.run_dir,
            trainer.logger,
            total_steps=trainer.total_training_steps,
            config_dict=self.config.model_dump(),
            start_step=self.start_step,
        )
        self._start_up = StartUp()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._tracker.close()

    def summary(self, failure: BaseException | None) -> tuple[dict[str, Any], BaseException | None]:
        """Write summary, plots and report. Return the summary and an error or None.

        The error is the first of: `failure`, an error while storing metrics (which does not stop the training), an
        error while writing summary, plots or report."""
        from qarl.trainer.loop import summarize

        config = self.config
        interrupted = isinstance(failure, KeyboardInterrupt)
        failed = None if failure is None or interrupted else f"{type(failure).__name__}: {str(failure)[:2000]}"
        history = read_metrics(config.run_dir)
        last = max((entry["step"] for entry in history), default=0)
        ending = Ending(failure or self._lost)
        summary = summarize(history) | {
            "backend": "verl",
            "quant_scheme": config.quant.scheme,
            "quant_kernels": config.quant.kernels,
            "quant_align": config.quant.align,
            "interrupted": interrupted,
            "finished": failure is None and last >= config.trainer.total_training_steps,
            "failed": failed or ending.in_words() if not interrupted else None,
            "seconds": time.perf_counter() - self.start,
        }
        with ending.attempt():
            write_summary(config.run_dir, summary)
        if config.trainer.plots and history:
            with ending.attempt(), writing(config.run_dir / "plots"):
                plot_run(config.run_dir)
        if config.trainer.report:
            with ending.attempt():
                write_report(config.run_dir)
        if self._tracker.problem is not None:
            with ending.attempt():
                raise self._tracker.problem
        return summary, ending.failure

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            self._start_up.look()
            self._read()

    def _read(self) -> None:
        """Log all complete new lines. Keep the first StorageError for `summary`. Print a warning for other errors."""
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
                what = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"warning: a line of {self.path} was not logged ({what})", file=sys.stderr)
            self._offset += len(line)

    def _log(self, entry: Mapping[str, Any]) -> None:
        metrics = our_names(entry["data"])
        self._start_up.end()
        if entry["step"] == self.start_step + 1:
            metrics["startup/seconds_to_first_step"] = time.perf_counter() - self.start
        self._tracker.log(metrics, step=entry["step"])
        update_report(self.config, entry["step"])


STAGES = (
    ("", "starting verl's task, which reads the data"),
    ("WorkerDict", "starting the trainer's processes and loading the model"),
    ("vllm_server_", "starting the rollout engines (vLLM)"),
    ("agent_loop_worker_", "publishing the weights, then the first evaluation or step"),
)
"""Part of the name of an actor, and what verl does once it exists, in order. Ray itself starts before them."""


class StartUp:
    """Call `look` from time to time, and `end` after the first step. `actors`: returns the names of Ray's actors, or
    None while Ray starts."""

    def __init__(self, actors: Callable[[], Sequence[str] | None] | None = None) -> None:
        self._actors = actors or _named_actors
        self._stage, self._begun, self._ended = -1, time.monotonic(), False
        say("starting Ray ...")

    def look(self) -> None:
        """Print a line if verl has come further."""
        names = None if self._ended else self._actors()
        if names is not None:
            reached = max(i for i, (part, _) in enumerate(STAGES) if not part or any(part in name for name in names))
            while self._stage < reached:
                self._next()
                say(f"{STAGES[self._stage][1]} ...")

    def end(self) -> None:
        """Print how long the last part took. Only the first call does so."""
        if not self._ended:
            self._ended = True
            self._next()

    def _next(self) -> None:
        doing = "starting Ray" if self._stage < 0 else STAGES[self._stage][1]
        now = time.monotonic()
        say(f"{doing}: {now - self._begun:.0f} s")
        self._stage, self._begun = self._stage + 1, now


def _named_actors() -> Sequence[str] | None:
    import ray

    with suppress(Exception):  # while Ray starts or ends
        if ray.is_initialized():
            names: list[str] = ray.util.list_named_actors()
            return names
    return None
