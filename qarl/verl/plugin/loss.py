"""`loss_mode=tbpo` in verl's registry of policy losses.

verl passes the log-probs, advantages and mask of a micro-batch to a policy loss. It does not pass `rollout_log_probs`
or the number of non-empty responses in the mini-batch. The engine (`qarl.verl.plugin.engine`) knows both. During its
forward and backward it stores both in a context variable of this module.

verl's own losses divide the sum over sequences by `global_batch_size`, which is ppo_mini_batch_size * rollout.n. Rows
with an empty mask add nothing to the sum, but they count in the divisor. So empty responses, and the rows that verl
adds to pad a batch, make the gradient smaller. TBPO divides by the number of non-empty responses over all micro-batches
and ranks. As in verl's `agg_loss`, the loss is then multiplied by the number of ranks, because FSDP averages gradients.
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
    """Data about the current micro-batch that the engine passes to the loss.

    `rollout_log_prob`: [B, T], or None if the rollout reported none. `responses`: number of non-empty responses in the
    whole mini-batch, over micro-batches and ranks. `statistics`: a dict that the loss fills for
    `qarl.tbpo.reduce_metrics`.
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
    """Compute the TBPO loss. The signature is that of verl's policy losses. All tensors are [B, T].

    The returned dict is empty, because the engine reports the metrics. Raise UserError if there are no rollout
    log-probs, if verl adds its own correction weights, or if the configuration is bad.
    """
    if rollout_is_weights is not None:
        raise UserError(
            "TBPO already weights the mismatch, and verl would add a second weight",
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
            "TBPO needs the rollout engine's log-probs, but the batch has no rollout_log_probs",
            where="actor_rollout_ref.rollout.calculate_log_probs",
            why="the trainer's own log-probs cannot replace them, because that would hide every mismatch",
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
