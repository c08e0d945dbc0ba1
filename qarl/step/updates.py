"""The updates of a training step: which log-probs they may compare, and which of them are skipped or dropped.

    COMPARING  The weights are still those that sampled, so a forward computes the trainer's true old log-probs.
    UPDATING   An update has been made, or may be made next.
    DROPPED    A difference was found in a step that took the rollout's log-probs for the trainer's
               (`actor.old_log_probs=auto`). The rest of the step makes no update, and its old log-probs are recomputed.

An update whose gradient is not finite is skipped: it changes neither weights nor the optimizer's state, and counts in
`skipped_steps`. The step goes on with the next mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from qarl.step.statistics import Counts


def is_skipped(norm: float) -> bool:
    """Return whether an update is skipped whose gradient has this norm."""
    return not math.isfinite(norm)


class StepState(Enum):
    COMPARING = auto()
    UPDATING = auto()
    DROPPED = auto()


class RunState(Enum):
    """What a run's weights have been through, in this order.

    LOADED    No update has been made. A mismatch over its limit ends the run.
    PROBED    The same, and |δ| has been compared with the model's rounding noise.
    TRAINED   An update has been made. A mismatch over its limit is a warning.
    """

    LOADED = auto()
    PROBED = auto()
    TRAINED = auto()


@dataclass
class StepUpdates:
    """The updates of one step.

    relies     `rollout` or `auto` if the step took the rollout's log-probs as old ones; None if they are recomputed
    compared   with `relies`, counts of the rows whose true old log-probs were compared with the rollout's: this rank's,
               and after `close` those of all ranks
    skipped    number of updates that were skipped because the gradient was not finite
    """

    relies: str | None = None
    state: StepState = StepState.COMPARING
    compared: Counts = field(default_factory=Counts)
    skipped: int = 0

    @property
    def dropped(self) -> bool:
        return self.state is StepState.DROPPED

    @property
    def compares(self) -> bool:
        """Whether the log-probs of a forward are compared with the rollout's."""
        return self.relies is not None and self.state is StepState.COMPARING

    def close(self, summed: Callable[[Sequence[float]], list[float]]) -> bool:
        """End the comparison, before the first optimizer step. Return whether any token could be compared.

        Every rank must call this, if `summed`, which sums each number over them, is a collective."""
        compared = self.compares
        self.state = StepState.UPDATING
        if compared:
            self.compared = self.compared.over_ranks(summed)
            if self.relies == "auto" and self.compared.differing > 0:
                self.state = StepState.DROPPED
        return compared

    def updated(self, norm: float) -> None:
        """Count an update whose gradient has this norm."""
        if is_skipped(norm):
            self.skipped += 1
