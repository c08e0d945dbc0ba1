"""verl's functions for objectives, advantages and corrections, for both backends.

This is the only module outside `qarl.verl` that imports verl. The import happens when a config first needs one of these
functions, because it takes seconds and loads ray. `require` makes a run without verl fail before it loads a model.

verl's losses read their settings from verl's `ActorConfig`. Its `global_batch_info` contains the number of responses
and tokens of the whole mini-batch. `agg_loss` divides each part's sum by it, so the losses of the parts add up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from qarl.errors import UserError
from qarl.objectives.settings import Correction, Settings


def require(settings: Settings, *, advantages: bool = False) -> None:
    """Import verl if these settings, or the advantages, need it. Raise UserError if it is not installed."""
    if settings.needs_verl or advantages:
        core_algos()


@functools.cache
def core_algos() -> Any:
    """Return the module `verl.trainer.ppo.core_algos`."""
    try:
        import verl.trainer.ppo.core_algos as module
    except ImportError as error:
        raise UserError(
            "verl is not installed, but this config needs its functions",
            where="actor.loss, algorithm.adv_estimator, rollout_correction",
            why=f"verl computes all losses except tbpo, and all corrections ({error})",
            fix="install qarl[cpu] or qarl[gpu], or set actor.loss=tbpo without rollout_correction",
        ) from error
    return module


@functools.cache
def corrections() -> Any:
    """Return the module `verl.trainer.ppo.rollout_corr_helper`."""
    core_algos()
    import verl.trainer.ppo.rollout_corr_helper as module

    return module


@functools.lru_cache(maxsize=8)
def actor_config(settings: Settings) -> Any:
    """Return verl's `ActorConfig` with these settings. `global_batch_info` is set for each call of a loss."""
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=settings.clip_ratio_low,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c,
        tau_pos=settings.tau_pos,
        tau_neg=settings.tau_neg,
        loss_agg_mode=settings.loss_agg_mode,
    )


def policy_loss(
    name: str, settings: Settings, *, responses: int, tokens: int, **tensors: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call verl's policy loss `name` on a part of a mini-batch. Return verl's loss and metrics.

    `responses`, `tokens`: their number in the whole mini-batch. `tensors`: the arguments of verl's losses, [B, T]."""
    core = core_algos()
    function = core.compute_policy_loss_reinforce if name == "reinforce" else core.get_policy_loss_fn(name)
    config = actor_config(settings)
    config.global_batch_info.update(_whole(settings, responses, tokens))
    loss, metrics = function(**tensors, loss_agg_mode=settings.loss_agg_mode, config=config)
    return loss, metrics


def kl_term(
    log_prob: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    settings: Settings,
    *,
    responses: int,
    tokens: int,
) -> torch.Tensor:
    """Return verl's KL term of a part of a mini-batch, before its factor, an FP32 scalar. The tensors are [B, T].

    Its value is that of K3. Its gradient is that of K2 (verl's `low_var_kl+`). In the mean over samples of the current
    policy this is the KL's own gradient; that of K3 is biased even there. Later mini-batches of a step use samples of
    an older policy, so K2's gradient is biased too. The term is averaged like the loss."""
    core = core_algos()
    new, old = (torch.where(mask, values, 0.0).float() for values in (log_prob, reference.detach()))
    found: torch.Tensor = core.agg_loss(
        loss_mat=core.kl_penalty(logprob=new, ref_logprob=old, kl_penalty="low_var_kl+"),
        loss_mask=mask.float(),
        loss_agg_mode=settings.loss_agg_mode,
        **_whole(settings, responses, tokens),
    )
    return found


def _whole(settings: Settings, responses: int, tokens: int) -> dict[str, int]:
    """Return verl's description of the whole mini-batch, by which `agg_loss` divides."""
    return {
        "dp_size": 1,
        "batch_num_tokens": max(tokens, 1),
        "global_batch_size": max(responses, 1),
        "loss_scale_factor": settings.loss_scale_factor,
    }


def outcome_advantages(
    name: str, rewards: torch.Tensor, group_ids: Sequence[Any], lengths: torch.Tensor
) -> torch.Tensor:
    """Return verl's advantages `name` ("rloo", "reinforce_plus_plus"), FP32 [batch], 0 for an empty response.

    `rewards`, `lengths`: [batch]. Like verl's reward managers, this puts the reward on the last token of a response.
    verl computes an advantage per token; all tokens of a response get the same advantage."""
    import numpy as np

    core = core_algos()
    from verl.trainer.config import AlgoConfig

    mask = (torch.arange(max(int(lengths.max()), 1), device=lengths.device) < lengths[:, None]).float()
    scores = torch.zeros_like(mask)
    rows = (lengths > 0).nonzero().flatten()
    scores[rows, lengths[rows] - 1] = rewards.float()[rows]
    function = core.get_adv_estimator_fn(name)
    index = np.array([str(group_id) for group_id in group_ids])
    advantages, _ = function(token_level_rewards=scores, response_mask=mask, index=index, config=AlgoConfig(gamma=1.0))
    found: torch.Tensor = advantages[:, 0]
    return found


def correction_weights(log_ratio: torch.Tensor, mask: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return verl's weights from log r_corr, [B, T]. `mask`: bool, with at least one token."""
    try:
        found: torch.Tensor
        found, _ = corrections().compute_rollout_correction_weights(
            log_ratio,
            mask.float(),
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.verl_weight_bounds,
            rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        )
        return found
    except ZeroDivisionError:
        # verl's metric of the effective sample size divides by mean(w^2), which is 0 only if every weight is 0.
        return torch.zeros_like(log_ratio)


def rejection_mask(log_ratio: torch.Tensor, mask: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return `mask` without the tokens that verl rejects, bool [B, T]. `mask` must contain at least one token."""
    passed, _ = corrections().compute_rollout_rejection_mask(
        log_ratio,
        mask.float(),
        rollout_rs=",".join(correction.rollout_rs),
        rollout_rs_threshold=correction.verl_rejection_bounds,
    )
    return mask & (passed > 0.5)
