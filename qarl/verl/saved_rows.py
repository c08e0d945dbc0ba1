"""The metrics of a step that is saved, written before its checkpoint.

verl 0.9.1 saves a step, then publishes its weights, then evaluates, and only then computes and logs the step's metrics
(`PPOTrainer.fit`). A run that ends in between, by an error, by Ctrl-C or because a process is killed, resumes after
that checkpoint, and nobody would ever log the step. So `SavedRows` writes what is known of the step into verl's log
(its logger `file`) before the checkpoint is complete, marked with `UNFINISHED`. verl's own line of the step replaces
it. If that never comes, `qarl.verl.followed_log` logs the marked line: at the end of the run, or at its resume if the
command itself was killed.

The line has no publish, no evaluation and no time of the checkpoint, and its `timing_s/step` ends before them. It costs
a second `_compute_metrics` in each step that is saved: verl's columns are fetched from its queue once more.
"""

from __future__ import annotations

import logging
import time
from copy import deepcopy
from typing import Any, NamedTuple

from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from qarl.errors import in_one_line
from qarl.verl.saving import UNFINISHED

_log = logging.getLogger("qarl.verl")


class Trained(NamedTuple):
    """A step whose updates are made. `began`: of `time.perf_counter()`."""

    batch: Any
    metrics: dict[str, Any]
    began: float


class SavedRows(PPOTrainer):
    """Logs a step before it is saved. It stands before verl's trainers among the bases."""

    _trained: Trained | None = None

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        began = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        self._trained = Trained(batch, metrics, began)
        return batch

    def log_unfinished(self) -> None:
        """Write the metrics of the step that was just made, marked. An error is logged: the checkpoint is worth more,
        and verl raises the same error again at the end of the step."""
        if self._trained is None:
            return
        batch, metrics, began = self._trained
        metrics = metrics | {UNFINISHED: 1.0}
        metrics.pop(DAPO_FILTERED_REWARD_COUNTS_KEY, None)  # a table, which verl logs elsewhere
        timing = self.timing_raw | {"step": time.perf_counter() - began}
        epoch = (self.global_steps - 1) // self.steps_per_epoch
        loads = self._rollout_moe_lb_metrics_accumulator
        try:
            self._rollout_moe_lb_metrics_accumulator = deepcopy(loads)  # verl counts the step later
            self._compute_metrics(
                batch, metrics, timing, global_steps=self.global_steps, epoch=epoch
            )
            self.logger.log(data=metrics, step=self.global_steps, backend=["file"])
        except Exception as error:
            text = "step %d: its metrics were not written before its checkpoint (%s)"
            _log.warning(text, self.global_steps, in_one_line(error))
        finally:
            self._rollout_moe_lb_metrics_accumulator = loads
