"""Adds `loss_mode=tbpo` and `loss_mode=qarl` to verl's policy losses. `qarl` is for all other values of `actor.loss`.

verl passes a micro-batch's log-probs, advantages, mask, and weights of `algorithm.rollout_correction` to a policy loss.
It does not pass `rollout_log_probs` or the number of non-empty responses in the mini-batch. The engine
(`qarl.verl.plugin.engine`) knows both. During its forward and backward it stores both in a context variable of this
module.

verl's own losses divide the sum over sequences by `global_batch_size`, which is ppo_mini_batch_size * rollout.n. This
counts empty responses and the rows that verl adds to pad a batch, so these make the gradient smaller. QaRL's losses
divide by the number of non-empty responses over all micro-batches and ranks. As in verl's `agg_loss`, the loss is then
multiplied by the number of ranks, because FSDP averages gradients.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from qarl.errors import UserError
from qarl.objectives.loss import objective_loss
from qarl.verl.plugin.config import objective_settings

OURS = ("tbpo", "qarl")
"""The values of `loss_mode` that this module registers."""


@dataclass
class MicroBatch:
    """Data about the current micro-batch that the engine passes to the loss.

    rollout_log_prob   [B, T], or None if the rollout reported no log-probs
    responses          number of non-empty responses in the whole mini-batch, over micro-batches and ranks
    tokens             number of tokens of these responses
    statistics         a dict that the loss fills for `qarl.objectives.metrics.reduce_metrics`
    """

    rollout_log_prob: torch.Tensor | None
    responses: int
    tokens: int = 1
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

    The returned dict is empty, because the engine reports the metrics. Raise UserError if the batch has no rollout
    log-probs, if verl passes its own correction weights, or if the configuration is not valid.
    """
    if rollout_is_weights is not None:
        raise UserError(
            "TBPO already weights the mismatch, and verl would add a second weight",
            where="algorithm.rollout_correction.rollout_is",
            fix="set it to null; actor_rollout_ref.actor.policy_loss.seq_tis_imp_ratio_cap caps TBPO's weight",
        )
    return _loss("tbpo", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, None)


@register_policy_loss("qarl")
def qarl_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the objective that `policy_loss.objective` names. Everything else is as in `tbpo_policy_loss`.

    `rollout_is_weights`: the weights of verl's trainer, for the whole batch of a step."""
    return _loss("qarl", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)


def _loss(
    mode: str,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    micro_batch = MICRO_BATCH.get()
    if micro_batch is None:
        raise UserError(
            f"loss_mode={mode} needs an engine that passes it the rollout's log-probs",
            where="actor_rollout_ref.actor.strategy",
            why="only QaRL's FSDP engine passes rollout_log_probs to the loss",
            fix="set actor_rollout_ref.actor.strategy=fsdp2",
        )
    if micro_batch.rollout_log_prob is None:
        raise UserError(
            f"loss_mode={mode} needs the rollout engine's log-probs, but the batch has no rollout_log_probs",
            where="actor_rollout_ref.rollout.calculate_log_probs",
            why="the trainer's own log-probs cannot replace them, because that would hide every mismatch",
            fix="set actor_rollout_ref.rollout.calculate_log_probs=True",
        )
    loss, statistics = objective_loss(
        log_prob,
        old_log_prob,
        micro_batch.rollout_log_prob.to(log_prob.device),
        advantages,
        response_mask,
        objective_settings(config, loss_agg_mode),
        weight=weight,
        responses=micro_batch.responses,
        tokens=micro_batch.tokens,
    )
    micro_batch.statistics.update(statistics)
    return loss * config.global_batch_info.get("dp_size", 1), {}
