"""`loss_mode=tbpo` in verl's registry of policy losses.

verl hands a policy loss the log-probs, advantages and mask of a micro-batch, but neither `rollout_log_probs` nor the
number of non-empty responses in the mini-batch. Both are known to the engine (`qarl.verl.plugin.engine`), which leaves
them here, in a context variable, around its forward and backward.

Normalisation. verl's own losses divide a sequence mean by `global_batch_size`, ppo_mini_batch_size * rollout.n, and
leave rows with an empty mask out of the sum only: empty responses, and the rows with which verl fills up a batch, thin
their gradient. TBPO divides by the non-empty responses over all micro-batches and ranks. As in verl's `agg_loss`
the loss is then multiplied by the number of ranks, because FSDP averages gradients over them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from qarl.errors import UserError
from qarl.tbpo import tbpo_loss
from qarl.verl.plugin.config import tbpo_config


@dataclass
class MicroBatch:
    """The engine's knowledge of the current micro-batch.

    `rollout_log_prob`: [B, T], or None if the rollout reported none. `responses`: non-empty ones of the whole
    mini-batch, over micro-batches and ranks. `statistics`: filled by the loss, for `qarl.tbpo.reduce_metrics`.
    """

    rollout_log_prob: torch.Tensor | None
    responses: int
    statistics: dict[str, float] = field(default_factory=dict)


MICRO_BATCH: ContextVar[MicroBatch | None] = ContextVar("qarl_micro_batch", default=None)


@register_policy_loss("tbpo")
def tbpo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's signature; all tensors [B, T]. The metrics go through the engine, so the dict is empty.

    Raises:
        UserError: no rollout log-probs, rollout-correction weights besides TBPO's own, or a bad configuration.
    """
    if rollout_is_weights is not None:
        raise UserError(
            "TBPO has its own weight for the mismatch, and verl's would come on top of it",
            where="algorithm.rollout_correction.rollout_is",
            fix="set it to null; actor_rollout_ref.actor.policy_loss.seq_tis_imp_ratio_cap caps TBPO's weight",
        )
    micro_batch = MICRO_BATCH.get()
    if micro_batch is None:
        raise UserError(
            "loss_mode=tbpo needs an engine that hands it the rollout's log-probs",
            where="actor_rollout_ref.actor.strategy",
            why="verl's losses are not given rollout_log_probs; QaRL's FSDP engine adds them",
            fix="set actor_rollout_ref.actor.strategy=fsdp2",
        )
    if micro_batch.rollout_log_prob is None:
        raise UserError(
            "TBPO needs the log-probs of the engine that sampled, and the batch has no rollout_log_probs",
            where="actor_rollout_ref.rollout.calculate_log_probs",
            why="taking the trainer's own in their place would hide every mismatch",
            fix="set actor_rollout_ref.rollout.calculate_log_probs=True",
        )
    loss, statistics = tbpo_loss(
        log_prob,
        old_log_prob,
        micro_batch.rollout_log_prob.to(log_prob.device),
        advantages,
        response_mask,
        tbpo_config(config.policy_loss, loss_agg_mode),
        global_batch_size=micro_batch.responses,
    )
    micro_batch.statistics.update(statistics)
    return loss * config.global_batch_info.get("dp_size", 1), {}
