"""TBPO's and the mismatch's statistics of a training step, over all its mini-batches, micro-batches and ranks.

verl averages a metric over mini-batches, which for a ratio of counts (the share of negative responses outside their
band, say) is another number. So counts are gathered here, and the metrics are made of them once, at the last mini-batch
of the step: verl's average is then of one number. verl prefixes what an actor reports with `actor/`: `mismatch/k3`
becomes `actor/mismatch/k3` in its loggers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from qarl.metrics import mismatch_metrics
from qarl.tbpo import reduce_metrics

AFTER_FIRST = ("actor/inside_band_frac", "actor/pos_outside_band_frac", "actor/neg_outside_band_frac")
"""Reported once more, `_after_first`, without the first mini-batch, whose ratios are 1 by construction."""


@dataclass
class StepStatistics:
    """What one rank has seen since the step began."""

    tbpo: list[list[dict[str, float]]] = field(default_factory=list)
    tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def begin_mini_batch(self) -> None:
        self.tbpo.append([])

    def add(self, statistics: dict[str, float]) -> None:
        """TBPO's statistics of one micro-batch."""
        if statistics:
            self.tbpo[-1].append(statistics)

    def add_tokens(self, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> None:
        """Both log-probs [B, T] and the mask [B, T] of one micro-batch."""
        valid = mask.bool()
        old, rollout = old_log_prob[valid].float(), rollout_log_prob[valid].float()
        self.tokens.append((old.cpu(), rollout.cpu(), valid.sum(-1).cpu()))

    def metrics(self, group: Any = None) -> dict[str, float]:
        """The metrics of the step, on the first rank of `group`; empty on the others. A collective."""
        gathered = _gather((self.tbpo, self.tokens), group)
        if gathered is None:
            return {}
        ranks = [tbpo for tbpo, _ in gathered]
        everything = [one for rank in ranks for mini_batch in rank for one in mini_batch]
        later = [one for rank in ranks for mini_batch in rank[1:] for one in mini_batch]
        found = reduce_metrics(everything)
        after_first = reduce_metrics(later)
        found |= {f"{name}_after_first": after_first[name] for name in AFTER_FIRST if name in after_first}
        tokens = [part for _, parts in gathered for part in parts]
        if any(old.numel() for old, _, _ in tokens):
            found |= mismatch_metrics(*_padded(tokens))
        return found


def _padded(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Old and rollout log-probs, and the mask: each [responses, longest]."""
    old, rollout, lengths = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    zeros = torch.zeros(mask.shape)
    return zeros.masked_scatter(mask, old), zeros.masked_scatter(mask, rollout), mask


def _gather(value: Any, group: Any) -> list[Any] | None:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return [value]
    group = group or torch.distributed.group.WORLD
    first = torch.distributed.get_global_rank(group, 0)
    is_first = torch.distributed.get_rank() == first
    gathered: list[Any] | None = [None] * torch.distributed.get_world_size(group) if is_first else None
    torch.distributed.gather_object(value, gathered, dst=first, group=group)
    return gathered
