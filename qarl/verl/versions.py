"""Which version of the weights sampled each token, and what a step says of it.

A version is the number of the training step that made the weights; version 0 is the model that the run begins with. A
publish interrupts answers, and the engine continues them with the new weights (partial rollout). So an answer has
runs of tokens, each from one version. verl itself knows only the first and the last (`min_global_steps`,
`max_global_steps`).

The mismatch of a stale token has two parts, whose sum is what `mismatch/*` has:

    log π_old - log π_rollout = (log π_old - log π_v) + (log π_v - log π_rollout)

π_old is the trainer's policy before the step, π_v the trainer's policy with the weights that sampled the token. The
first difference is staleness, which the loss corrects. The second one is the mismatch δ of kernels and quantization, 0
in every bit where the trainer computes as the engine (`quant.align`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

VERSIONS = "versions"
"""The entry of an answer's `extra_fields` with its runs of tokens."""
Runs = list[tuple[int, int]]
"""Version and number of each run of tokens of an answer."""
NOT_SAMPLED = -1
"""The version of tokens that no weights have sampled: those of an environment or a tool."""


def versions_to_keep(staleness: int) -> int:
    """Return how many of the last versions may have sampled tokens of a step with `trainer.staleness`.

    Ages are below 2N, not N + 1: verl's `wait` (0.9.1, replay_buffer.py, `_has_enough_samples`) waits for a prompt only
    from the step at which its age is N. A run begins with N + 1 batches of the same weights. If N of them lag, the
    first N steps train on others, and then each step takes one of the N: the last one is 2N - 1 steps old."""
    return max(2 * staleness, 1)


def run_lengths(versions: Iterable[int]) -> Runs:
    """Return the runs of single tokens' versions."""
    return [(version, len(list(run))) for version, run in groupby(versions)]


def expanded(runs: Iterable[Sequence[int]]) -> list[int]:
    """Return the version of each token."""
    return [version for version, count in runs for _ in range(count)]


def placed(versions: Sequence[int], mask: Sequence[int]) -> Runs:
    """Return the runs of a whole answer. `versions`: of the sampled tokens. `mask`: 1 where the answer's token was
    sampled. An answer may have been cut off, so that it has fewer."""
    sampled = iter(versions)
    return run_lengths(next(sampled) if sampled_here else NOT_SAMPLED for sampled_here in mask)


def padded(rows: Sequence[Iterable[Sequence[int]]], width: int) -> Tensor:
    """Return the versions of all tokens, int64 [rows, width], with `NOT_SAMPLED` behind the end of a row."""
    versions = torch.full((len(rows), width), NOT_SAMPLED)
    for index, runs in enumerate(rows):
        row = torch.tensor(expanded(runs)[:width], dtype=torch.int64)
        versions[index, : len(row)] = row
    return versions


@dataclass
class VersionStatistics:
    """What one step has seen of versions.

    rows    number of answers
    mixed   of them those with tokens of several versions
    ages    of each sampled token, in steps
    delta   log π_v - log π_rollout of each token that was checked
    ratio   log π_old - log π_v of the same tokens
    over_limit   whether the mean |δ| is over the limit. None: nobody has asked yet
    """

    rows: int = 0
    mixed: int = 0
    ages: list[Tensor] = field(default_factory=list)
    delta: list[Tensor] = field(default_factory=list)
    ratio: list[Tensor] = field(default_factory=list)
    over_limit: bool | None = None

    def add_rows(self, rows: Sequence[Iterable[Sequence[int]]], current: int) -> None:
        """Count answers by their runs. `current`: the version of the weights before the step."""
        for runs in rows:
            versions = torch.tensor(expanded(runs))
            versions = versions[versions != NOT_SAMPLED]
            self.rows += 1
            self.mixed += len(versions.unique()) > 1
            self.ages.append(current - versions)

    def add_checked(self, own: Tensor, old: Tensor, rollout: Tensor) -> None:
        """Add tokens that were checked. All arguments are log-probs [tokens]: of the trainer with the weights that
        sampled, of the trainer before the step, and of the rollout."""
        self.delta.append((own - rollout).double())
        self.ratio.append((old - own).double())

    @property
    def mean_delta(self) -> float:
        """Mean |δ| of the tokens that were checked, NaN without any."""
        return float(torch.cat(self.delta).abs().mean()) if self.delta else float("nan")

    @property
    def mean_length(self) -> float:
        """Mean number of sampled tokens in an answer."""
        return sum(map(len, self.ages)) / max(self.rows, 1)

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, {} if no answer says its versions."""
        if not self.rows:
            return {}
        ages = torch.cat(self.ages).double()
        metrics = {
            "staleness/age_mean": float(ages.mean()),
            "staleness/age_max": float(ages.max()),
            "staleness/mixed_frac": self.mixed / self.rows,
            "staleness/checked_frac": sum(map(len, self.delta)) / max(len(ages), 1),
        }
        if self.delta:
            ratio = torch.cat(self.ratio)
            metrics |= {
                "mismatch/of_version_abs_mean": self.mean_delta,
                "mismatch/of_version_abs_max": float(torch.cat(self.delta).abs().max()),
                "staleness/ratio_abs_mean": float(ratio.abs().mean()),
                "staleness/ratio_k3": float((torch.expm1(ratio) - ratio).mean()),
            }
        return metrics
