"""The objectives. All have one signature. Their sum over a mini-batch does not depend on how it is split.

    r_t           exp(log_prob - old_log_prob), the ratio of a token
    s             exp mean_t(log_prob - old_log_prob), the ratio of a response
    A             the advantage
    [low, high]   [1 - clip_ratio_low, 1 + clip_ratio_high]

With `bypass_mode`, the rollout's log-probs replace the old ones in r_t and s.

    tbpo            qarl.tbpo                                                         arXiv 2604.07853
    grpo            max(-r_t A, -clip(r_t, low, high) A)                              arXiv 2402.03300
    dual_clip       the same, but at most -c A if A < 0, c = clip_ratio_c             arXiv 1912.09729
    gspo            max(-s A, -clip(s, low, high) A)                                  arXiv 2507.18071
    mis_gspo        gspo times w, the product of r_corr, 0 if w > mis_imp_ratio_cap   arXiv 2604.07853, figure 8
    positive_only   grpo if A > 0, else 0                                             arXiv 2604.07853, figure 8
    sapo            -(4/tau) sigmoid(tau (r_t - 1)) A, tau = tau_pos or tau_neg       arXiv 2511.20347
    reinforce       -log_prob A                                                       arXiv 2605.14220, section 3.2

Every loss except TBPO is verl's function. verl's `vanilla` always applies dual clip's bound, by default with c = 3.
`grpo` sets c so high that this bound never applies.

The sum over a mini-batch is divided by the number of its non-empty responses (of its tokens with token-mean). They are
counted before rejection. So a rejected response has no gradient but stays in the denominator (arXiv 2605.14220,
equations 7 to 11). verl divides by ppo_mini_batch_size * rollout.n, which also counts empty responses.
"""

from __future__ import annotations

import torch

from qarl.objectives import library
from qarl.objectives.corrections import kept, sequence_mis_weights, weights
from qarl.objectives.metrics import correction_statistics, loss_statistics
from qarl.objectives.settings import Settings
from qarl.tbpo import tbpo_loss

_VERL_NAMES = {
    "grpo": "vanilla",
    "dual_clip": "vanilla",
    "positive_only": "vanilla",
    "gspo": "gspo",
    "mis_gspo": "gspo",
    "sapo": "sapo",
    "reinforce": "reinforce",
}


def objective_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    settings: Settings,
    *,
    weight: torch.Tensor | None = None,
    responses: int,
    tokens: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of a part of a mini-batch, an FP32 scalar, and statistics for `metrics.reduce_metrics`.

    Args:
        log_prob: [B, T], log-probs of the policy being trained. Only this argument receives a gradient.
        old_log_prob: [B, T], the trainer's log-probs before this step's updates.
        rollout_log_prob: [B, T], the log-probs that the sampling engine reported.
        advantages: [B], or [B, T] constant over the tokens of a row.
        response_mask: [B, T], bool or 0/1. Values at other positions are ignored, even NaN.
        weight: [B, T], the correction's weights, if `batch_weights` computed them. If None, they are computed here.
        responses, tokens: number of non-empty responses in the whole mini-batch before any rejection, and number of
            their tokens.

    Raise ValueError as `tbpo_loss` does. Raise UserError if the loss needs verl, but verl is not installed.
    """
    correction = settings.correction
    if settings.loss == "tbpo" and not correction.rejects:
        return tbpo_loss(
            log_prob,
            old_log_prob,
            rollout_log_prob,
            advantages,
            response_mask,
            settings.tbpo,
            global_batch_size=max(responses, 1),
        )
    mask = response_mask != 0
    keep = kept(log_prob, old_log_prob, rollout_log_prob, mask, correction)
    if settings.loss == "tbpo":
        bands, count = settings.tbpo, max(responses, 1)
        loss, statistics = tbpo_loss(
            log_prob, old_log_prob, rollout_log_prob, advantages, keep, bands, global_batch_size=count
        )
        return loss, statistics | correction_statistics(mask, keep, None)
    if settings.loss == "mis_gspo":
        weight = sequence_mis_weights(old_log_prob, rollout_log_prob, mask, settings.mis_imp_ratio_cap)
    elif weight is None:
        weight = weights(old_log_prob, rollout_log_prob, mask, correction)
    new, old, rollout = (
        torch.where(keep, values, 0.0).float()
        for values in (log_prob, old_log_prob.detach(), rollout_log_prob.detach())
    )
    per_token = advantages.detach().float() if advantages.dim() == 2 else advantages.detach().float()[:, None]
    per_token = torch.where(keep, per_token, 0.0)
    against = rollout if correction.bypass_mode else old
    uses_ratio = settings.loss != "reinforce"
    loss, found = library.policy_loss(
        _VERL_NAMES[settings.loss],
        settings,
        responses=responses,
        tokens=tokens,
        log_prob=new,
        advantages=per_token.clamp(min=0.0) if settings.loss == "positive_only" else per_token,
        response_mask=keep,
        rollout_is_weights=weight,
        **{"old_log_prob" if uses_ratio else "rollout_log_prob": against},
    )
    advantage = per_token.gather(1, keep.int().argmax(dim=-1, keepdim=True)).squeeze(1)
    statistics = loss_statistics(new, old, against, rollout, advantage, keep, found, uses_ratio=uses_ratio)
    if correction.rejects or weight is not None:
        statistics |= correction_statistics(mask, keep, weight)
    return loss, statistics


def batch_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, settings: Settings
) -> torch.Tensor | None:
    """Return the correction's weights for the whole batch of a step, FP32 [B, T], or None if none is configured."""
    return weights(old_log_prob, rollout_log_prob, response_mask != 0, settings.correction)
