"""The old log-probs of a local run: computes what `qarl.step.old_log_probs` decides to check or to recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qarl.config import Config
from qarl.kernels.sampling_masks import Truncation
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.step.old_log_probs import (
    PassSchedule,
    differing_tokens,
    drawn,
    last_bits,
    sample_size,
)
from qarl.trainer.batch import Batch

Compute = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""A function that returns the trainer's log-probs, FP32 [B, R], of the given rows (int64). None means all rows."""


@dataclass
class Measured:
    """The trainer's own log-probs that this step has computed before its first optimizer step, FP32 [B, R].

    `known`: bool [B]; the rows of `log_probs` that have been computed."""

    log_probs: torch.Tensor
    known: torch.Tensor


class OldLogProbs:
    """The old log-probs of a local run. In each step, call `begin` before the update, `confirm_or_recompute` within it.

    measured  the trainer's log-probs of this step
    messages  the log lines of this step
    """

    def __init__(self, config: Config, compute: Compute) -> None:
        """`compute`: runs the policy's forward (`LocalTrainer.old_log_probs`)."""
        truncated = Truncation(config.rollout.top_p, config.rollout.top_k).active
        self.schedule = PassSchedule("recompute" if truncated else config.actor.old_log_probs)
        self.fraction = config.actor.old_log_probs_sample
        self.within = last_bits("cuda" if torch.cuda.is_available() else "cpu")
        self.mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
        self.compute = compute
        self.messages: list[str] = []

    def begin(self, batch: Batch, *, seed: int) -> torch.Tensor:
        """Return the old log-probs of a step, FP32 [B, R]. `seed`: seed of the random sample of rows to check."""
        rollout = batch.rollout_log_probs
        self.messages = []
        if not self.schedule.begin():
            own = self._recompute(batch)
            return rollout if self.schedule.mode == "rollout" else own
        known = torch.zeros(len(batch), dtype=torch.bool, device=rollout.device)
        self.measured = Measured(torch.zeros_like(rollout), known)
        if self.schedule.mode == "auto" and self._sample_differs(batch, seed):
            return self._fall_back(batch)
        return rollout

    def confirm_or_recompute(
        self, batch: Batch, old_log_probs: torch.Tensor, log_probs: torch.Tensor
    ) -> torch.Tensor:
        """Return the old log-probs of this step: `old_log_probs`, or recomputed ones if a check of `auto` failed.

        `log_probs`: those of the first mini-batch in the update, FP32 [rows, R], before any weight has changed."""
        first = slice(0, len(log_probs))
        if self.measured.known[first].all():
            return old_log_probs
        self.measured.log_probs[first] = log_probs
        self.measured.known[first] = True
        if self.schedule.mode == "auto" and self._differs(batch, first):
            return self._fall_back(batch)
        return old_log_probs

    def mismatch(self, batch: Batch) -> dict[str, float]:
        """Return `mismatch_metrics` over the rows that have been measured."""
        return mismatch_metrics(
            self.measured.log_probs,
            batch.rollout_log_probs,
            batch.response_mask & self.measured.known[:, None],
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a finished step: those of `PassSchedule`, and

        old_log_probs/checked_frac  share of the rows whose log-probs the trainer computed before the first optimizer
                                    step, so that `mismatch/*` covers them
        """
        checked = float(self.measured.known.float().mean())
        return self.schedule.metrics | {"old_log_probs/checked_frac": checked}

    def _recompute(self, batch: Batch) -> torch.Tensor:
        """Compute all rows, and count this for the next steps. Return the trainer's log-probs."""
        own = self.compute(batch, None)
        self.measured = Measured(own, torch.ones(len(batch), dtype=torch.bool, device=own.device))
        rollout = batch.rollout_log_probs
        differing = differing_tokens(own, rollout, batch.response_mask, self.within)
        if self.schedule.recomputed(differing):
            but_for = f" but for {self.within:g}" if self.within else ""
            self.messages.append(
                f"the trainer's log-probs equal the rollout's on every token{but_for}, so the next step does not "
                "recompute the old log-probs (actor.old_log_probs=auto)"
            )
        return own

    def _fall_back(self, batch: Batch) -> torch.Tensor:
        """Recompute all old log-probs, because a check of this step found a difference. Return them."""
        self.schedule.fell_back()
        patience = self.schedule.skipping.patience
        self.messages.append(
            "the trainer's log-probs differ from the rollout's, so this step recomputes the old log-probs "
            f"(actor.old_log_probs=auto); the next {patience} steps do so, too"
        )
        return self._recompute(batch)

    def _sample_differs(self, batch: Batch, seed: int) -> bool:
        """Compute a random sample of the rows outside the first mini-batch. Return whether any token differs."""
        filled = batch.response_mask.any(1)
        filled[: self.mini_batch] = False
        others = filled.nonzero()[:, 0]
        count = sample_size(len(others), self.fraction)
        if not count:
            return False
        rows = others[drawn(len(others), count, seed).to(others.device)]
        own = self.compute(batch, rows)
        self.measured.log_probs[rows] = own[rows]
        self.measured.known[rows] = True
        self.schedule.sampled(count, len(others))
        return self._differs(batch, rows)

    def _differs(self, batch: Batch, rows: slice | torch.Tensor) -> bool:
        measured = self.measured.log_probs[rows]
        rollout = batch.rollout_log_probs[rows]
        return differing_tokens(measured, rollout, batch.response_mask[rows], self.within) > 0
