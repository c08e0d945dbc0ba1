"""The source of a step's old log-probs (`actor.old_log_probs`), and checks of the rollout's log-probs.

    recompute  Recompute them in a forward over the whole batch before the update (the pass).
    rollout    Use the rollout's log-probs. The first step still measures the mismatch on all rows.
    auto       Use the rollout's log-probs while they equal the trainer's. Otherwise recompute.

`auto` skips the pass after a step in which all recomputed log-probs had δ = 0, that is, equalled the rollout's bit for
bit. Before a skipped step changes any weight, it makes two checks:

- The forwards of the first mini-batch use the weights that sampled, so they compute its true old log-probs. These are
  compared with the rollout's. This check needs no extra forward.
- The old log-probs of a random sample of the other rows are computed. If d of M rows differ, a sample of k rows
  contains at least one of them with probability 1 - C(M-d, k) / C(M, k) (`find_probability`).

At the first difference, the step drops its gradients, recomputes all old log-probs, and starts the update again. This
is a fallback. After each fallback, `auto` requires twice as many recomputed steps without a difference before it skips
again, but at most `MOST_PATIENCE`. So even a run with frequent differences wastes few forwards. The first step, also
after a resume, always recomputes. A checkpoint keeps both counts, so a resumed run is as patient as before.

verl's `bypass_mode` also uses the rollout's log-probs. It makes no checks and always drops the weight for mismatch.
The verl backend uses `Skipping`, `sample_size` and `find_probability` of this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qarl.config import Config
from qarl.metrics.mismatch import mismatch_metrics
from qarl.trainer.batch import Batch, Rows

MOST_PATIENCE = 32
"""Largest number of recomputed steps without a difference that `auto` waits for before it skips again."""

Compute = Callable[[Batch, torch.Tensor | None], torch.Tensor]
"""A function that returns the trainer's log-probs, FP32 [B, R], of the given rows (int64). None means all rows."""


class RolloutDiffers(Exception):
    """The trainer's log-probs of the first mini-batch differ from the rollout's, in a step that relies on them."""


def find_probability(rows: int, sampled: int, differing: int = 1) -> float:
    """Return the probability that a sample contains at least one of the `differing` rows.

    `sampled` of `rows` rows are drawn without replacement."""
    return 1.0 - math.comb(rows - differing, sampled) / math.comb(rows, sampled)


def sample_size(rows: int, fraction: float) -> int:
    """Return the number of rows to check out of `rows`: `fraction` of them, rounded up."""
    return min(rows, math.ceil(rows * fraction))


def differing_tokens(log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of tokens with δ != 0. A NaN counts as a difference. All arguments are [rows, R]."""
    return int(((log_prob != rollout_log_prob) & mask).sum())


class Skipping:
    """Decides for each step whether `auto` skips the pass. `clean`: number of consecutive recomputed steps without a
    difference. `patience`: the number of such steps that is required."""

    def __init__(self) -> None:
        self.clean, self.patience = 0, 1

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
    """The trainer's own log-probs that this step has computed before its first optimizer step.

    log_probs   FP32 [B, R]
    known       bool [B]; the rows of `log_probs` that have been computed
    first       number of rows of the first mini-batch, which is the start of the batch
    strict      whether a difference in the first mini-batch raises RolloutDiffers
    """

    log_probs: torch.Tensor
    known: torch.Tensor
    first: int
    strict: bool

    def see(self, batch: Batch, rows: Rows, log_prob: torch.Tensor) -> None:
        """Store the log-probs of a forward of the update, [rows, R], if they are from the weights that sampled.

        These are only the log-probs of the first pass over the first mini-batch. Others are ignored. Raise
        RolloutDiffers if `strict` is true and they differ from the rollout's."""
        numbers = torch.arange(len(self.known), device=self.known.device)[rows]
        if bool((numbers >= self.first).any() | self.known[numbers].all()):
            return
        self.log_probs[rows], self.known[rows] = log_prob.detach(), True
        if self.strict and differing_tokens(log_prob, batch.rollout_log_probs[rows], batch.response_mask[rows]):
            raise RolloutDiffers


class OldLogProbs:
    """The old log-probs of a local run. `measured`: the trainer's log-probs of this step. `messages`: the log lines of
    this step."""

    def __init__(self, config: Config) -> None:
        self.mode, self.fraction = config.actor.old_log_probs, config.actor.old_log_probs_sample
        self.mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
        self.skipping, self.started = Skipping(), False
        self.measured: Measured | None = None
        self.messages: list[str] = []
        self.found: dict[str, float] = {}

    @property
    def recomputed(self) -> bool:
        """Whether the old log-probs of all rows of this step were recomputed in one pass over the batch."""
        return bool(self.found["old_log_probs/recomputed"])

    def begin(self, batch: Batch, compute: Compute, *, seed: int) -> torch.Tensor:
        """Return the old log-probs of a step, FP32 [B, R]. `seed`: seed of the random sample of rows to check."""
        skips = self.started and (self.skipping.skips if self.mode == "auto" else self.mode == "rollout")
        self.started, self.messages = True, []
        self.found = dict.fromkeys(("old_log_probs/recomputed", "old_log_probs/fallback"), 0.0)
        self.found["old_log_probs/from_rollout"] = float(skips or self.mode == "rollout")
        if not skips:
            own = self._recompute(batch, compute)
            return batch.rollout_log_probs if self.mode == "rollout" else own
        rollout = batch.rollout_log_probs
        known = torch.zeros(len(batch), dtype=torch.bool, device=rollout.device)
        first = min(self.mini_batch, len(batch))
        self.measured = Measured(torch.zeros_like(rollout), known, first, strict=self.mode == "auto")
        if self.mode == "auto" and self._sample_differs(batch, compute, seed):
            return self.fall_back(batch, compute)
        return rollout

    def fall_back(self, batch: Batch, compute: Compute) -> torch.Tensor:
        """Recompute all old log-probs, because a check of this step found a difference. Return them."""
        self.skipping.fell_back()
        self.found |= {"old_log_probs/fallback": 1.0, "old_log_probs/from_rollout": 0.0}
        self.messages.append(
            "the trainer's log-probs differ from the rollout's, so this step recomputes the old log-probs "
            f"(actor.old_log_probs=auto); the next {self.skipping.patience} steps do so, too"
        )
        return self._recompute(batch, compute)

    def see(self, batch: Batch, rows: Rows, log_prob: torch.Tensor) -> None:
        """Store the log-probs of a forward of the update (`Measured.see`). Raise RolloutDiffers if this step skipped
        the pass and these log-probs differ from the rollout's."""
        if self.measured is not None:
            self.measured.see(batch, rows, log_prob)

    def mismatch(self, batch: Batch) -> dict[str, float]:
        """Return `mismatch_metrics` over the rows that have been measured."""
        assert self.measured is not None  # `begin` comes first
        return mismatch_metrics(
            self.measured.log_probs, batch.rollout_log_probs, batch.response_mask & self.measured.known[:, None]
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
        assert self.measured is not None  # `begin` comes first
        return self.found | {"old_log_probs/checked_frac": float(self.measured.known.float().mean())}

    def _recompute(self, batch: Batch, compute: Compute) -> torch.Tensor:
        own = compute(batch, None)
        known = torch.ones(len(batch), dtype=torch.bool, device=own.device)
        self.measured = Measured(own, known, 0, strict=False)
        before = self.skipping.skips
        self.skipping.recomputed(differing_tokens(own, batch.rollout_log_probs, batch.response_mask))
        self.found["old_log_probs/recomputed"] = 1.0
        if self.mode == "auto" and self.skipping.skips and not before:
            self.messages.append(
                "the trainer's log-probs equal the rollout's on every token, so the next step does not recompute the "
                "old log-probs (actor.old_log_probs=auto)"
            )
        return own

    def _sample_differs(self, batch: Batch, compute: Compute, seed: int) -> bool:
        """Compute a random sample of the rows outside the first mini-batch. Return whether any token has δ != 0."""
        assert self.measured is not None
        filled = batch.response_mask.any(1)
        filled[: self.measured.first] = False
        others = filled.nonzero()[:, 0]
        count = sample_size(len(others), self.fraction)
        if not count:
            return False
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:count]
        rows = others[drawn.to(others.device).sort().values]
        own = compute(batch, rows)
        batch.other_experts = None  # only these rows have been counted
        self.measured.log_probs[rows], self.measured.known[rows] = own[rows], True
        self.found["old_log_probs/find_prob"] = find_probability(len(others), count)
        return differing_tokens(own[rows], batch.rollout_log_probs[rows], batch.response_mask[rows]) > 0
