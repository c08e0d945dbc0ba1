"""The source of a step's old log-probs (`actor.old_log_probs`), and checks of the rollout's log-probs.

    recompute  Recompute them in a forward over the whole batch before the update (the pass).
    rollout    Use the rollout's log-probs. The first step still measures the mismatch on all rows.
    auto       Use the rollout's log-probs while they equal the trainer's. Otherwise recompute. With top-p or top-k it
               always recomputes, because the pass also finds the tokens that these leave.

`auto` skips the pass after a step in which all recomputed log-probs had δ = 0, that is, equalled the rollout's bit for
bit. Before a skipped step changes any weight, it makes two checks:

- The forwards of the first mini-batch use the weights that sampled, so they compute its true old log-probs. These are
  compared with the rollout's. This check needs no extra forward.
- The old log-probs of a random sample of the other rows are computed. If d of M rows differ, a sample of k rows
  contains at least one of them with probability 1 - C(M-d, k) / C(M, k), which is k / M for d = 1.

If they differ, the step drops its gradients, recomputes all old log-probs, and starts the update again. This is a
fallback. After each fallback, `auto` requires twice as many recomputed steps without a difference before it skips
again, but at most `MOST_PATIENCE`. So even a run with frequent differences wastes few forwards. The first step, also
after a resume, always recomputes. A checkpoint keeps both counts, so a resumed run is as patient as before.

verl's `bypass_mode` also uses the rollout's log-probs. It makes no checks and always drops the weight for mismatch.
The verl backend uses `Skipping` and `sample_size` of this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qarl.config import Config
from qarl.kernels.log_probs import Truncation
from qarl.metrics.step_metrics import mismatch_metrics
from qarl.trainer.batch import Batch, Rows

MOST_PATIENCE = 32
"""Largest number of recomputed steps without a difference that `auto` waits for before it skips again."""

Compute = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""A function that returns the trainer's log-probs, FP32 [B, R], of the given rows (int64). None means all rows."""


def sample_size(rows: int, fraction: float) -> int:
    """Return the number of rows to check out of `rows`: `fraction` of them, rounded up."""
    return min(rows, math.ceil(rows * fraction))


def differing_tokens(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor
) -> int:
    """Return the number of tokens with δ != 0. A NaN counts as a difference. All arguments are [rows, R]."""
    return int(((log_prob != rollout_log_prob) & mask).sum())


class Skipping:
    """Decides for each step whether `auto` skips the pass. `clean`: number of consecutive recomputed steps without a
    difference. `patience`: the number of such steps that is required."""

    def __init__(self) -> None:
        self.clean = 0
        self.patience = 1

    @property
    def skips(self) -> bool:
        return self.clean >= self.patience

    def recomputed(self, differing: int) -> None:
        """Note that a step recomputed its whole batch and `differing` of its tokens had δ != 0."""
        self.clean = 0 if differing else self.clean + 1

    def fell_back(self) -> None:
        """Note that a step which skipped the pass found a difference."""
        self.clean, self.patience = 0, min(2 * self.patience, MOST_PATIENCE)

    def state_dict(self) -> dict[str, int]:
        return {"clean": self.clean, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.clean, self.patience = int(state["clean"]), int(state["patience"])


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
        self.mode = config.actor.old_log_probs
        self.fraction = config.actor.old_log_probs_sample
        if Truncation(config.rollout.top_p, config.rollout.top_k).active:
            self.mode = "recompute"
        self.mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
        self.compute = compute
        self.skipping = Skipping()
        self.started = False
        self.messages: list[str] = []
        self.values: dict[str, float] = {}

    def begin(self, batch: Batch, *, seed: int) -> torch.Tensor:
        """Return the old log-probs of a step, FP32 [B, R]. `seed`: seed of the random sample of rows to check."""
        rollout = batch.rollout_log_probs
        skips = self.started and (
            self.skipping.skips if self.mode == "auto" else self.mode == "rollout"
        )
        self.started = True
        self.messages = []
        self.values = dict.fromkeys(("old_log_probs/recomputed", "old_log_probs/fallback"), 0.0)
        self.values["old_log_probs/from_rollout"] = float(skips or self.mode == "rollout")
        if not skips:
            own = self._recompute(batch)
            return rollout if self.mode == "rollout" else own
        known = torch.zeros(len(batch), dtype=torch.bool, device=rollout.device)
        self.measured = Measured(torch.zeros_like(rollout), known)
        if self.mode == "auto" and self._sample_differs(batch, seed):
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
        if self.mode == "auto" and self._differs(batch, first):
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
        """Return the metrics of a finished step:

        old_log_probs/recomputed    1 if a pass over the whole batch computed the trainer's log-probs, otherwise 0
        old_log_probs/from_rollout  1 if the update used the rollout's log-probs as the old ones, otherwise 0
        old_log_probs/fallback      1 if a check found a difference in a step that had skipped the pass
        old_log_probs/checked_frac  share of the rows whose log-probs the trainer computed before the first optimizer
                                    step, so that `mismatch/*` covers them
        old_log_probs/find_prob     only if rows were sampled: the probability that the sample contains a differing row,
                                    if only one row outside the first mini-batch differs
        """
        return self.values | {
            "old_log_probs/checked_frac": float(self.measured.known.float().mean())
        }

    def _recompute(self, batch: Batch) -> torch.Tensor:
        """Compute all rows, and count this for the next steps. Return the trainer's log-probs."""
        own = self.compute(batch, None)
        self.measured = Measured(own, torch.ones(len(batch), dtype=torch.bool, device=own.device))
        before = self.skipping.skips
        self.skipping.recomputed(
            differing_tokens(own, batch.rollout_log_probs, batch.response_mask)
        )
        self.values["old_log_probs/recomputed"] = 1.0
        if self.mode == "auto" and self.skipping.skips and not before:
            self.messages.append(
                "the trainer's log-probs equal the rollout's on every token, so the next step does not recompute the "
                "old log-probs (actor.old_log_probs=auto)"
            )
        return own

    def _fall_back(self, batch: Batch) -> torch.Tensor:
        """Recompute all old log-probs, because a check of this step found a difference. Return them."""
        self.skipping.fell_back()
        self.values |= {"old_log_probs/fallback": 1.0, "old_log_probs/from_rollout": 0.0}
        self.messages.append(
            "the trainer's log-probs differ from the rollout's, so this step recomputes the old log-probs "
            f"(actor.old_log_probs=auto); the next {self.skipping.patience} steps do so, too"
        )
        return self._recompute(batch)

    def _sample_differs(self, batch: Batch, seed: int) -> bool:
        """Compute a random sample of the rows outside the first mini-batch. Return whether any token has δ != 0."""
        filled = batch.response_mask.any(1)
        filled[: self.mini_batch] = False
        others = filled.nonzero()[:, 0]
        count = sample_size(len(others), self.fraction)
        if not count:
            return False
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:count]
        rows = others[drawn.to(others.device).sort().values]
        own = self.compute(batch, rows)
        self.measured.log_probs[rows] = own[rows]
        self.measured.known[rows] = True
        self.values["old_log_probs/find_prob"] = count / len(others)
        return self._differs(batch, rows)

    def _differs(self, batch: Batch, rows: Rows) -> bool:
        measured = self.measured.log_probs[rows]
        rollout = batch.rollout_log_probs[rows]
        return differing_tokens(measured, rollout, batch.response_mask[rows]) > 0
