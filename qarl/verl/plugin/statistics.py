"""Statistics of the objective and of the mismatch for one step, over all its mini-batches, micro-batches and ranks.

verl averages each metric over mini-batches. An average is wrong for a ratio of counts, such as the share of negative
responses outside their band. So this module collects counts, and computes the metrics once, at the last mini-batch of
the step. verl then averages a single number. verl adds the prefix `actor/` to the metrics, so `mismatch/k3` becomes
`actor/mismatch/k3` in verl's loggers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from verl.utils.device import get_device_id

from qarl.metrics.error_tokens import text_metrics, text_statistics
from qarl.metrics.mismatch import Reduce, token_mismatch
from qarl.objectives.metrics import after_first_metrics, reduce_metrics


@dataclass(frozen=True)
class MiniBatchCounts:
    """Statistics of a mini-batch over all ranks, before its update.

    `responses`: number of non-empty responses. `tokens`: number of their unmasked tokens. `different`: number of tokens
    whose old log-prob differs from the rollout's. `mismatch`: mean |old - rollout| over tokens. If the batch lacks old
    or rollout log-probs, `mismatch` is None and all tokens count as `different`.
    """

    responses: int
    tokens: int
    different: int
    mismatch: float | None

    @property
    def all_equal(self) -> bool:
        return self.tokens > 0 and self.different == 0

    @property
    def response_length(self) -> float:
        return self.tokens / max(self.responses, 1)


def count_mini_batch(rows: Any, group: Any = None) -> MiniBatchCounts:
    """Return the counts of a mini-batch. Every rank of `group` must call this function, because it is a collective.

    `rows`: this rank's padded `response_mask` and, if they exist, `old_log_probs` and `rollout_log_probs`; each [B, T].
    """
    mask = rows["response_mask"] != 0
    known = "old_log_probs" in rows and "rollout_log_probs" in rows
    different, delta = mask, torch.zeros((), device=mask.device)
    if known:
        # Positions without a token may have any value. NaN counts as different, because NaN != 0.
        delta = torch.where(mask, rows["old_log_probs"].float() - rows["rollout_log_probs"].float(), delta).abs()
        different = mask & (delta != 0)
    sums = [mask.any(-1).sum(), mask.sum(), different.sum(), delta.double().sum()]
    counts = torch.stack([one.double() for one in sums])
    if torch.distributed.is_initialized():
        counts = counts.to(get_device_id())
        torch.distributed.all_reduce(counts, group=group)
    responses, tokens, different, total = counts.tolist()
    mismatch = total / tokens if known and tokens else None
    return MiniBatchCounts(int(responses), int(tokens), int(different), mismatch)


@dataclass
class StepStatistics:
    """Statistics that one rank has collected since the step began."""

    tbpo: list[list[dict[str, float]]] = field(default_factory=list)
    text: list[dict[str, float]] = field(default_factory=list)
    tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    routing: tuple[int, int] = (0, 0)
    """Two counts: tokens for which the actor's own routers chose different experts than the rollout's, and all tokens
    for which the rollout's experts are known."""

    def begin_mini_batch(self) -> int:
        """Begin a mini-batch, and return its number in the step, from 1."""
        self.tbpo.append([])
        return len(self.tbpo)

    def add(self, statistics: dict[str, float]) -> None:
        """Add the objective's statistics of one micro-batch."""
        if statistics:
            self.tbpo[-1].append(statistics)

    def add_text(self, rows: Any, *, vocabulary: int) -> None:
        """Add statistics of one micro-batch's text. `rows`: responses, rollout log-probs, advantages and mask, each
        [B, T], or None. `vocabulary`: number of tokens of the tokenizer."""
        if rows is None:
            return
        tokens, log_probs = rows["responses"], rows["rollout_log_probs"]
        self.text.append(
            text_statistics(tokens, log_probs, rows["advantages"], rows["response_mask"], vocabulary=vocabulary)
        )

    def add_tokens(self, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> None:
        """Add log-probs and mask of one micro-batch, each [B, T]. Their tokens stay on their device."""
        valid = mask.bool()
        self.tokens.append((old_log_prob[valid].float(), rollout_log_prob[valid].float(), valid.sum(-1)))

    @property
    def mean_length(self) -> float:
        """Mean number of tokens in this rank's non-empty responses."""
        lengths = torch.cat([lengths for _, _, lengths in self.tokens]) if self.tokens else torch.zeros(0)
        lengths = lengths[lengths > 0].float()
        return float(lengths.mean()) if len(lengths) else 0.0

    def metrics(self, group: Any = None) -> dict[str, float]:
        """Return the step's metrics on the first rank of `group`, and {} on the others. All ranks must call it."""
        mismatch = self._mismatch(group)
        gathered = _gather((self.tbpo, self.routing, self.text), group)
        if gathered is None:
            return {}
        ranks = [tbpo for tbpo, *_ in gathered]
        everything = [one for rank in ranks for mini_batch in rank for one in mini_batch]
        later = [one for rank in ranks for mini_batch in rank[1:] for one in mini_batch]
        found = reduce_metrics(everything) | after_first_metrics(later)
        found |= text_metrics(part for *_, parts in gathered for part in parts)
        found |= mismatch
        other, known = (sum(counts) for counts in zip(*(routing for _, routing, _ in gathered), strict=True))
        if known:
            found["mismatch/other_experts_frac"] = other / known
        return found

    def _mismatch(self, group: Any) -> dict[str, float]:
        """Return the mismatch metrics of all ranks' tokens. Each rank sums its own on its device."""
        device = self.tokens[0][0].device if self.tokens else torch.device("cpu")
        if torch.distributed.is_initialized():
            device = torch.empty(0, device=get_device_id()).device
        empty = (torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        old, rollout, lengths = (torch.cat(parts).to(device) for parts in zip(*(self.tokens or [empty]), strict=True))
        return token_mismatch(old, rollout, lengths, _reduce_over(group))


def _reduce_over(group: Any) -> Reduce:
    """Return the function that sums a tensor over the ranks of `group`."""

    def reduce(value: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(value, group=group)
        return value

    return reduce


def _gather(value: Any, group: Any) -> list[Any] | None:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return [value]
    group = group or torch.distributed.group.WORLD
    first = torch.distributed.get_global_rank(group, 0)
    is_first = torch.distributed.get_rank() == first
    gathered: list[Any] | None = [None] * torch.distributed.get_world_size(group) if is_first else None
    torch.distributed.gather_object(value, gathered, dst=first, group=group)
    return gathered
