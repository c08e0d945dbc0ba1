"""Checks in verl's engine whether a step may use the rollout's log-probs as old log-probs (`actor.old_log_probs`).

QaRL's trainer for verl (`qarl.verl.plugin.trainer`) sets `RELIES` in a batch if its `old_log_probs` are the rollout's.
The forwards of the first mini-batch use the weights that sampled, so they compute the true old log-probs of its rows.
`FirstMiniBatch` compares them with the rollout's. With `auto`, if any rank finds a difference, the engine drops the
gradients and skips the rest of the update. The trainer then recomputes the old log-probs and starts the update again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from qarl.trainer.old_log_probs import differing_tokens

RELIES = "qarl_old_log_probs"
"""Key in verl's batches. The value is `rollout` or `auto` if `old_log_probs` are the rollout's. Otherwise the key is
missing or None."""
DIFFERING = "old_log_probs_differing"
"""Metric of the actor: number of tokens with δ != 0 in the first mini-batch of a dropped update."""


@dataclass
class FirstMiniBatch:
    """The comparison with the rollout's log-probs in one update.

    relies      `rollout`, `auto`, or None if the old log-probs were recomputed
    open        whether the weights are still those that sampled; only then forwards are compared
    dropped     whether the update was dropped because of a difference
    differing   number of tokens with δ != 0
    delta       sum of |δ|
    tokens      number of compared tokens
    responses   number of compared non-empty responses

    The last four are over this rank's compared rows. After `close` they are over all ranks.
    """

    relies: str | None = None
    open: bool = True
    dropped: bool = False
    differing: float = 0.0
    delta: float = 0.0
    tokens: float = 0.0
    responses: float = 0.0

    @property
    def mismatch(self) -> float | None:
        """Mean |δ| per compared token, or None if no token was compared."""
        return self.delta / self.tokens if self.tokens else None

    @property
    def response_length(self) -> float:
        return self.tokens / max(self.responses, 1.0)

    def see(self, output: Any, rows: Any, micro_batch: Any) -> torch.Tensor | None:
        """Compare the log-probs of a forward with the rollout's, if the comparison is `open`. `rows`: padded
        `old_log_probs`, `rollout_log_probs` and `response_mask`.

        Return the trainer's log-probs of these rows before the update, [B, T], or None if they were not computed."""
        if self.relies is None:
            old: torch.Tensor = rows["old_log_probs"]
            return old
        if not self.open:
            return None
        own = no_padding_2_padding(output["model_output"]["log_probs"], micro_batch).float()
        mask, rollout = (rows["response_mask"] != 0).to(own.device), rows["rollout_log_probs"].to(own.device)
        self.differing += differing_tokens(own, rollout, mask)
        self.delta += float((own - rollout)[mask].double().abs().sum())
        self.tokens += float(mask.sum())
        self.responses += float(mask.any(-1).sum())
        return own

    def close(self, group: Any) -> bool:
        """End the comparison, before the first optimizer step. Return whether it was open and compared any token.

        Every rank of `group` must call this method, because it is a collective."""
        compared, self.open = self.relies is not None and self.open, False
        if not compared:
            return False
        counts = torch.tensor([self.differing, self.delta, self.tokens, self.responses], dtype=torch.float64)
        if torch.distributed.is_initialized():
            counts = counts.to(get_device_id())
            torch.distributed.all_reduce(counts, group=group)
        self.differing, self.delta, self.tokens, self.responses = counts.tolist()
        self.dropped = self.relies == "auto" and self.differing > 0
        return True


def relies_on(data: Any) -> str | None:
    """Return the value of `RELIES` in one of verl's batches."""
    value = tu.get(data, key=RELIES, default=None)
    return None if value is None else str(value)
