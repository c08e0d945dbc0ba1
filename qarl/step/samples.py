"""Log a few responses of some steps with δ of each token, for the report (`qarl.report.samples`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qarl.errors import UserError
from qarl.report.samples import append_samples, chosen_samples, is_logged


@dataclass(frozen=True)
class SampleRows:
    """Rows to choose samples from.

    prompts         token ids of each prompt, int64 [tokens]
    responses       token ids of each response, int64 [tokens]
    deltas          the trainer's log-prob minus the rollout's, for each token; empty for rows that were not measured
    advantages      of each row
    rewards         of each row, or None if the backend does not know them
    finish_reasons  of each row, or None if the backend does not know them
    turns           the spans of each row's tokens that the model sampled, or None if it sampled all of them
    """

    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    deltas: Sequence[Sequence[float]]
    advantages: Sequence[float]
    rewards: Sequence[float] | None = None
    finish_reasons: Sequence[str | None] | None = None
    turns: Sequence[Sequence[tuple[int, int]]] | None = None

    def chosen(self, step: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """Return the lines of the rows to log."""
        known: dict[str, Sequence[Any]] = {}
        if self.rewards is not None:
            known["reward"] = self.rewards
        if self.finish_reasons is not None:
            known["finish_reason"] = self.finish_reasons
        if self.turns is not None:
            known["turns"] = self.turns
        return chosen_samples(
            step, self.prompts, self.responses, self.deltas, self.advantages, decode, **known
        )


@dataclass(frozen=True)
class SampleLog:
    """Where and when the samples of a run are logged.

    folder     the run folder, which has the file
    last_step  number of the run's last step, which is always logged, or None if it is not known
    decode     the text of some token ids
    warn       says why samples could not be written
    """

    folder: Path
    last_step: int | None
    decode: Callable[[list[int]], str]
    warn: Callable[[str], None]

    def write(
        self,
        step: int,
        rows: Callable[[], SampleRows],
        *,
        lacking: tuple[type[Exception], ...] = (),
    ) -> None:
        """Append the samples of `step`, if it is logged.

        `rows`: makes the rows. `lacking`: what it raises for a batch without the columns. These errors, and those of
        the file, only lead to a warning."""
        if not is_logged(step, self.last_step):
            return
        expected: tuple[type[Exception], ...] = (UserError, OSError, *lacking)
        try:
            samples = rows().chosen(step, self.decode)
            self.folder.mkdir(parents=True, exist_ok=True)
            append_samples(self.folder, samples)
        except expected as error:
            self.warn(f"the samples of step {step} were not written: {error}")
