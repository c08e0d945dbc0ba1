"""verl's functions for objectives, advantages and corrections, for both backends.

This is the only module outside `qarl.verl` that imports verl. The import happens when a config first needs one of these
functions, because it takes seconds and loads ray. `require` makes a run without verl fail before it loads a model.

verl's losses read their settings from verl's `ActorConfig`. Its `global_batch_info` contains the number of responses
and tokens of the whole mini-batch. `agg_loss` divides each part's sum by it, so the losses of the parts add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qarl.config.actor import RolloutCorrectionConfig
from qarl.config.objectives import TOKEN_CLIP
from qarl.errors import UserError
from qarl.objectives.settings import NO_DUAL_CLIP, SAME_IN_VERL, Settings

_NEVER = 1e-30
"""A lower bound below every weight. verl's weights are at least e^-20 = 2e-9."""
_LARGEST = 700.0
"""Every K1 of a response is below this number of nats, and the exponential of this number is still a finite float."""


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


def actor_config(settings: Settings) -> Any:
    """Return verl's `ActorConfig` with these settings. `global_batch_info` is set for each call of a loss."""
    reads_bound = "clip_ratio_c" in settings.objective.keys
    dual_clip = settings.clip_ratio_c if reads_bound else NO_DUAL_CLIP
    keys = {name: getattr(settings, name) for name in (*SAME_IN_VERL, "loss_agg_mode")}
    return _actor_config(**keys | {"clip_ratio_c": dual_clip})


@functools.lru_cache(maxsize=8)
def _actor_config(**keys: Any) -> Any:
    from verl.workers.config import ActorConfig

    # verl uses `clip_ratio` if the other two are null.
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=TOKEN_CLIP[0],
        **keys,
    )


def policy_loss(
    name: str, settings: Settings, *, responses: int, tokens: int, **tensors: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    """Call verl's policy loss `name` on a part of a mini-batch. Return verl's loss and metrics.

    `responses`, `tokens`: their number in the whole mini-batch. `tensors`: the arguments of verl's losses, [B, T]."""
    core = core_algos()
    reinforce = core.compute_policy_loss_reinforce
    function = reinforce if name == "reinforce" else core.get_policy_loss_fn(name)
    config = actor_config(settings)
    config.global_batch_info.update(_whole(settings, responses, tokens))
    loss, metrics = function(**tensors, loss_agg_mode=settings.loss_agg_mode, config=config)
    return loss, metrics


def kl_term(
    log_prob: Tensor,
    reference: Tensor,
    mask: Tensor,
    settings: Settings,
    *,
    responses: int,
    tokens: int,
) -> Tensor:
    """Return verl's KL term of a part of a mini-batch, before its factor, an FP32 scalar. The tensors are [B, T].

    Its value is that of K3. Its gradient is that of K2 (verl's `low_var_kl+`). In the mean over samples of the current
    policy this is the KL's own gradient; that of K3 is biased even there. Later mini-batches of a step use samples of
    an older policy, so K2's gradient is biased too. The term is averaged like the loss."""
    core = core_algos()
    new = torch.where(mask, log_prob, 0.0).float()
    old = torch.where(mask, reference.detach(), 0.0).float()
    of_tokens = core.kl_penalty(logprob=new, ref_logprob=old, kl_penalty="low_var_kl+")
    loss: Tensor = core.agg_loss(
        loss_mat=of_tokens,
        loss_mask=mask.float(),
        loss_agg_mode=settings.loss_agg_mode,
        **_whole(settings, responses, tokens),
    )
    return loss


def _whole(settings: Settings, responses: int, tokens: int) -> dict[str, int]:
    """Return verl's description of the whole mini-batch, by which `agg_loss` divides."""
    return {
        "dp_size": 1,
        "batch_num_tokens": max(tokens, 1),
        "global_batch_size": max(responses, 1),
        "loss_scale_factor": settings.loss_scale_factor,
    }


def outcome_advantages(
    name: str, rewards: Tensor, group_ids: Sequence[Any], lengths: Tensor
) -> Tensor:
    """Return verl's advantages `name` ("rloo", "reinforce_plus_plus"), FP32 [batch], 0 for an empty response.

    `rewards`, `lengths`: [batch]. Like verl's reward managers, this puts the reward on the last token of a response,
    and that of an empty response where its mask is 0: verl's group baselines (rloo) sum over all tokens, so it counts
    among the rewards of its group, and its whitening (reinforce) over those of the mask, so there it does not.
    verl computes an advantage per token; all tokens of a response get the same advantage."""
    import numpy as np

    core = core_algos()
    from verl.trainer.config import AlgoConfig

    longest = max(int(lengths.max()), 1)
    positions = torch.arange(longest, device=lengths.device)
    mask = (positions < lengths[:, None]).float()
    scores = torch.zeros_like(mask)
    last = (lengths - 1) % longest
    scores[torch.arange(len(lengths), device=lengths.device), last] = rewards.float()
    function = core.get_adv_estimator_fn(name)
    index = np.array([str(group_id) for group_id in group_ids])
    config = AlgoConfig(gamma=1.0)
    advantages, _ = function(
        token_level_rewards=scores, response_mask=mask, index=index, config=config
    )
    per_response: Tensor = advantages[:, 0]
    return per_response


def has_weight(correction: RolloutCorrectionConfig) -> bool:
    """Return whether verl has this weight."""
    return correction.rollout_is in ("token", "sequence") and correction.rollout_is_mode != "clip"


def weight_bounds(correction: RolloutCorrectionConfig) -> str | float:
    """Return verl's `rollout_is_threshold`: a number truncates, LOWER_UPPER sets weights outside to 0 (IcePop).

    `mask` is IcePop with a lower bound that has no effect."""
    upper = correction.rollout_is_threshold
    if correction.rollout_is_mode == "truncate":
        return upper
    lower = correction.lower if correction.rollout_is_mode == "icepop" else _NEVER
    return f"{lower!r}_{upper!r}"


def rejection_bounds(correction: RolloutCorrectionConfig) -> str:
    """Return verl's `rollout_rs_threshold`. Bounds of K2 and K3 are in nats, those of K1 are exp(K1): LOWER_UPPER."""
    options = correction.rollout_rs
    uppers = correction.rollout_rs_threshold
    if len(uppers) == 1:
        uppers = uppers * len(options)
    lower = correction.rollout_rs_threshold_lower
    if lower is None:
        lower = -_LARGEST
    bounds = []
    for option, upper in zip(options, uppers, strict=True):
        bound = repr(upper)
        if option.endswith("k1"):
            bound = f"{_bounded_exp(lower)!r}_{_bounded_exp(upper)!r}"
        bounds.append(bound)
    return ",".join(bounds)


def _bounded_exp(nats: float) -> float:
    return math.exp(min(max(nats, -_LARGEST), _LARGEST))


def correction_weights(
    log_ratio: Tensor, mask: Tensor, correction: RolloutCorrectionConfig
) -> Tensor:
    """Return verl's weights from log r_corr, [B, T]. `mask`: bool, with at least one token."""
    try:
        weights: Tensor
        weights, _ = corrections().compute_rollout_correction_weights(
            log_ratio,
            mask.float(),
            rollout_is=correction.rollout_is,
            rollout_is_threshold=weight_bounds(correction),
            rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        )
        return weights
    except ZeroDivisionError:
        # verl's metric of the effective sample size divides by mean(w^2), which is 0 only if every weight is 0.
        return torch.zeros_like(log_ratio)


def rejection_mask(log_ratio: Tensor, mask: Tensor, correction: RolloutCorrectionConfig) -> Tensor:
    """Return `mask` without the tokens that verl rejects, bool [B, T]. `mask` must contain at least one token."""
    passed, _ = corrections().compute_rollout_rejection_mask(
        log_ratio,
        mask.float(),
        rollout_rs=",".join(correction.rollout_rs),
        rollout_rs_threshold=rejection_bounds(correction),
    )
    return mask & (passed > 0.5)
