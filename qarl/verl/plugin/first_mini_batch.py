"""The proof in verl's engine that a step may use the rollout's log-probs as old log-probs (`actor.old_log_probs`).

QaRL's trainer for verl (`qarl.verl.plugin.trainer`) tells the engine through `RELIES` that a batch's `old_log_probs`
are the rollout's. The forwards of the first mini-batch use the weights that sampled, so they give the true old
log-probs of its rows. `FirstMiniBatch` collects them. With `auto` and a difference on any rank, the engine drops the
gradients and does nothing for the rest of the update, and the trainer starts it again with recomputed log-probs.
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
"""Key in verl's batches: `rollout` or `auto` if `old_log_probs` are the rollout's, else missing or None."""
DIFFERING = "old_log_probs_differing"
"""Metric of the actor: number of tokens with δ != 0 in the first mini-batch of an update that was dropped."""


@dataclass
class FirstMiniBatch:
    """One update, as far as it relies on the rollout's log-probs.

    relies     `rollout`, `auto`, or None if the old log-probs were recomputed
    open       whether the weights are still those that sampled, so that forwards are compared
    dropped    whether the update was given up because of a difference
    differing, delta, tokens, responses   sums over this rank's compared rows, over all ranks after `close`: tokens with
               δ != 0, |δ|, tokens, and non-empty responses
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
        """Mean |δ| per compared token, or None if there is none."""
        return self.delta / self.tokens if self.tokens else None

    @property
    def response_length(self) -> float:
        return self.tokens / max(self.responses, 1.0)

    def see(self, output: Any, rows: Any, micro_batch: Any) -> torch.Tensor | None:
        """Compare the log-probs of a forward with the rollout's, while the comparison is open. `rows`: padded
        `old_log_probs`, `rollout_log_probs` and `response_mask`.

        Return the trainer's log-probs before the update, [B, T], or None if nobody has computed those of these rows."""
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
        """End the comparison, before the first optimizer step. Return whether it was open and anything was compared.
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
    """Return the value of `RELIES` in a batch of verl's."""
    value = tu.get(data, key=RELIES, default=None)
    return None if value is None else str(value)
