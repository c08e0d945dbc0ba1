"""What a step collects from its micro-batches, to compute its metrics once, over all tokens and ranks.

An average of metrics over micro-batches is wrong for maxima and for shares, so counts and log-probs are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from qarl.objectives.metrics import after_first_metrics, reduce_metrics
from qarl.step.old_log_probs import last_bits

Statistics = dict[str, float]
TokenPairs = tuple[Tensor, Tensor, Tensor]
"""Of each token the trainer's log-prob and the rollout's, both FP32 [tokens], and int64 [rows] tokens of each row."""


@dataclass
class Counts:
    """Counts of some rows: non-empty `responses`, their unmasked `tokens`, `differing` tokens, whose |δ| between
    trainer and rollout is above `last_bits`, and `delta`, the sum of |δ|."""

    responses: float = 0.0
    tokens: float = 0.0
    differing: float = 0.0
    delta: float = 0.0

    @classmethod
    def of(cls, mask: Tensor, own: Tensor, rollout: Tensor) -> Counts:
        """Count rows. `own`: the trainer's log-probs. All tensors are [B, T], and only `own` may have a gradient."""
        valid = (mask != 0).to(own.device)
        difference = own.detach().float() - rollout.to(own.device).float()
        # Positions without a token may have any value. NaN counts as different, because it is not below anything.
        delta = torch.where(valid, difference, 0.0).abs()
        responses = valid.any(-1).sum()
        differing = (~(delta <= last_bits(own.device.type))).sum()
        sums = [responses, valid.sum(), differing, delta.double().sum()]
        numbers = torch.stack([value.double() for value in sums])
        return cls(*numbers.tolist())

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))

    def over_ranks(self, summed: Callable[[Sequence[float]], list[float]]) -> Counts:
        """Return the counts of all ranks. `summed`: sums each number over them, which may be a collective."""
        return Counts(*summed(astuple(self)))

    @property
    def mismatch(self) -> float:
        """Mean |δ| per token."""
        return self.delta / max(self.tokens, 1.0)

    @property
    def response_length(self) -> float:
        return self.tokens / max(self.responses, 1.0)


@dataclass
class LogProbPairs:
    """The log-probs of trainer and rollout of all tokens of a step. `parts`: one entry for each micro-batch."""

    parts: list[TokenPairs] = field(default_factory=list)

    def add(self, own: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Add log-probs and mask of one micro-batch, each [B, T]. Their tokens stay on the device of `own`."""
        valid = mask.bool().to(own.device)
        rollout = rollout.to(own.device)
        pair = (own[valid].float(), rollout[valid].float())
        self.parts.append((*pair, valid.sum(-1)))

    def joined(self, device: torch.device | str = "cpu") -> TokenPairs:
        """Return all tokens on `device`."""
        nothing = torch.zeros(0)
        parts = self.parts or [(nothing, nothing, nothing.long())]
        own, rollout, lengths = (
            torch.cat(column).to(device) for column in zip(*parts, strict=True)
        )
        return own, rollout, lengths

    @property
    def mean_length(self) -> float:
        """Mean number of tokens in non-empty rows, or 0."""
        if not self.parts:
            return 0.0
        lengths = torch.cat([lengths for _, _, lengths in self.parts])
        filled = lengths[lengths > 0].double()
        return float(filled.mean()) if len(filled) else 0.0


class MicroBatchStatistics(NamedTuple):
    """The objective's statistics of one micro-batch. `first`: whether it is of the step's first mini-batch, in which
    every ratio is 1."""

    values: Statistics
    first: bool


@dataclass
class ObjectiveStatistics:
    """The objective's statistics of a step. `parts`: one entry for each micro-batch."""

    parts: list[MicroBatchStatistics] = field(default_factory=list)

    def add(self, values: Statistics, *, first: bool) -> None:
        self.parts.append(MicroBatchStatistics(values, first))

    def metrics(self) -> dict[str, float]:
        """Return the objective's metrics."""
        later = [part.values for part in self.parts if not part.first]
        return reduce_metrics([part.values for part in self.parts]) | after_first_metrics(later)
