"""The source of a step's old log-probs (`actor.old_log_probs`), and checks of the rollout's log-probs.

    recompute  Recompute them in a forward over the whole batch before the update (the pass).
    rollout    Use the rollout's log-probs. The first step still measures the mismatch on all rows.
    auto       Use the rollout's log-probs while they equal the trainer's. Otherwise recompute. With top-p or top-k it
               always recomputes, because the pass also finds the tokens that these leave.

`auto` skips the pass after a step in which all recomputed log-probs equalled the rollout's: on a CPU bit for bit, on a
GPU up to the last bits of a log-softmax (`LAST_BITS`). Before a skipped step changes any weight, it makes two checks:

- The forwards of the first mini-batch use the weights that sampled, so they compute its true old log-probs. These are
  compared with the rollout's. This check needs no extra forward.
- The old log-probs of a random sample of the other rows are computed. If d of M rows differ, a sample of k rows
  contains at least one of them with probability 1 - C(M-d, k) / C(M, k), which is k / M for d = 1.

If they differ, the step drops its gradients, recomputes all old log-probs, and makes the update with these. This is a
fallback. After each fallback, `auto` requires twice as many recomputed steps without a difference before it skips
again, but at most `MOST_PATIENCE`. So even a run with frequent differences wastes few forwards. The first step, also
after a resume, always recomputes. A checkpoint keeps both counts, so a resumed run is as patient as before.

verl's `bypass_mode` also uses the rollout's log-probs. It makes no checks and always drops the weight for mismatch.

`PassSchedule` decides, and counts for the metrics. A backend computes: it runs the pass, the sample and the first
mini-batch, and tells the schedule what differed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

MOST_PATIENCE = 32
"""Largest number of recomputed steps without a difference that `auto` waits for before it skips again."""


def sample_size(rows: int, fraction: float) -> int:
    """Return the number of rows to check out of `rows`: `fraction` of them, rounded up."""
    return min(rows, math.ceil(rows * fraction))


def expected_share(mode: str, *, exact: bool, sample: float, mini_batches: int) -> float:
    """Return the share of its rows whose old log-probs a step of a long run computes before its update.

    `mode`: a value of actor.old_log_probs. `exact`: whether δ is 0 on every token. `sample`:
    actor.old_log_probs_sample, the share of the rows outside the first mini-batch that `auto` checks."""
    if mode == "rollout":
        return 0.0
    if mode == "auto" and exact:
        return sample * (1 - 1 / mini_batches)
    return 1.0


def drawn(rows: int, count: int, seed: int) -> torch.Tensor:
    """Return `count` random numbers below `rows`, all different and in order, int64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows, generator=generator)[:count].sort().values


LAST_BITS = {"cuda": 1e-5}
"""Kind of device -> the largest |δ| that counts as none; 0 where it is not named. On a GPU trainer and engine sum the
log-softmax in different orders. On an H200 that left a mean of 3e-8 and at most 2.7e-6 in steps whose other operators
gave equal bits (benchmarks/results/gpu_check_2026-11-27.json). One other rounding of a weight's product is far above:
δ is then 1e-3. And 1e-5 on every token of a response would be a thirtieth of TBPO's narrowest band."""


def last_bits(device_type: str) -> float:
    """Return the largest |δ| that counts as none on this kind of device."""
    return LAST_BITS.get(device_type, 0.0)


def differing_tokens(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, within: float
) -> int:
    """Return the number of tokens with |δ| > `within`. A NaN counts as a difference. All arguments are [rows, R]."""
    same = log_prob == rollout_log_prob
    if within:
        same |= (log_prob - rollout_log_prob).abs() <= within
    return int((~same & mask).sum())


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
        """Note that a step recomputed its whole batch and `differing` of its tokens differed."""
        self.clean = 0 if differing else self.clean + 1

    def fell_back(self) -> None:
        """Note that a step which skipped the pass found a difference."""
        self.clean = 0
        self.patience = min(2 * self.patience, MOST_PATIENCE)

    def state_dict(self) -> dict[str, int]:
        return {"clean": self.clean, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.clean = int(state["clean"])
        self.patience = int(state["patience"])


class PassSchedule:
    """Decides which steps of a run make the pass, by its `mode`, a value of `actor.old_log_probs`.

    In each step, call `begin`, then `recomputed` after a pass, and `fell_back` before a pass that a difference caused.

    skipping  the counts of `auto`, for a checkpoint
    metrics   of this step:

        old_log_probs/recomputed    1 if a pass over the whole batch computed the trainer's log-probs, otherwise 0
        old_log_probs/from_rollout  1 if the update used the rollout's log-probs as the old ones, otherwise 0
        old_log_probs/fallback      1 if a check found a difference in a step that had skipped the pass
        old_log_probs/find_prob     only if rows were sampled: the probability that the sample contains a differing row,
                                    if only one row outside the first mini-batch differs
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.skipping = Skipping()
        self.metrics: dict[str, float] = {}
        self._started = False

    def begin(self) -> bool:
        """Begin a step. Return whether it skips the pass."""
        skips = self._started and self._would_skip()
        self._started = True
        self.metrics = {
            "old_log_probs/recomputed": float(not skips),
            "old_log_probs/fallback": 0.0,
            "old_log_probs/from_rollout": float(skips or self.mode == "rollout"),
        }
        return skips

    def _would_skip(self) -> bool:
        if self.mode == "auto":
            return self.skipping.skips
        return self.mode == "rollout"

    def recomputed(self, differing: int) -> bool:
        """Note that a pass has found `differing` tokens. Return whether it is the pass after which `auto` skips."""
        skipped_before = self.skipping.skips
        self.skipping.recomputed(differing)
        return self.mode == "auto" and self.skipping.skips and not skipped_before

    def sampled(self, count: int, others: int) -> None:
        """Note that `count` of the `others`, the rows outside the first mini-batch, were checked."""
        self.metrics["old_log_probs/find_prob"] = count / others

    def fell_back(self) -> None:
        """Note that a check of this step found a difference, so it recomputes."""
        self.skipping.fell_back()
        self.metrics |= {
            "old_log_probs/recomputed": 1.0,
            "old_log_probs/fallback": 1.0,
            "old_log_probs/from_rollout": 0.0,
        }
