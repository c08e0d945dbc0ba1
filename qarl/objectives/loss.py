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

The section `rollout_correction` corrects the mismatch between trainer and rollout engine with weights and rejections:

    r_corr = exp(old_log_prob - rollout_log_prob)      the mismatch alone
    r_ppo  = exp(log_prob - rollout_log_prob)          the mismatch and the updates since the rollout

- A weight multiplies a token's loss by r_corr, or by the product or geometric mean of r_corr over the response. The
  weight is bounded (arXiv 2605.14220, equation 6; IcePop: arXiv 2510.18855).
- A rejection leaves out tokens or responses whose divergence is above a threshold (equations 7 to 11 of the same
  paper). The paper sums its divergences over the tokens of a response, as `seq_sum_k1` and `seq_sum_k3` do here.
- A veto leaves out a response if one of its tokens has almost no probability (Miles' notes on the mismatch, "Veto
  Mechanism").

verl's `rollout_corr_helper` computes token weights, sequence weights and rejections. verl 0.9.1 lacks the geometric
weight, the mode `clip` and the veto, so this module implements them. Log-ratios are clipped to 20 before an
exponential, as in verl.

Legend: B responses, T token positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qarl.config.actor import RolloutCorrectionConfig
from qarl.config.objectives import get_objective
from qarl.objectives import verl_functions
from qarl.objectives.metrics import correction_statistics, loss_statistics
from qarl.objectives.settings import Settings
from qarl.tbpo.loss import unread_tbpo_loss
from qarl.tbpo.reading import Unread

SAFETY_BOUND = 20.0
"""verl's bound on log-ratios."""


@dataclass(frozen=True)
class LossInputs:
    """What an objective is computed from: a part of a mini-batch.

    log_prob           [B, T]  log-probs of the policy being trained, the only ones with a gradient
    old_log_prob       [B, T]  the trainer's log-probs before this step's updates
    rollout_log_prob   [B, T]  the log-probs that the sampling engine reported
    advantages         [B], or [B, T] constant over the tokens of a row
    mask               [B, T]  bool, the tokens of responses
    accepted           [B, T]  bool or 0/1, `mask` without rejected tokens
    weight             [B, T]  the correction's weights for the whole batch, or None if the objective computes them
    responses, tokens  numbers of non-empty responses and of their tokens in the whole mini-batch, before rejections
    """

    log_prob: Tensor
    old_log_prob: Tensor
    rollout_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    accepted: Tensor
    weight: Tensor | None
    responses: int
    tokens: int

    @property
    def token_advantages(self) -> Tensor:
        """FP32 [B, T], 0 outside of `accepted`."""
        advantages = self.advantages.detach().float()
        per_token = advantages if advantages.dim() == 2 else advantages[:, None]
        return torch.where(self.accepted != 0, per_token, 0.0)


Loss = tuple[Tensor, Unread]
"""An FP32 scalar, and statistics for `metrics.reduce_metrics`, which `read` reads from the device."""


def objective_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    settings: Settings,
    *,
    weight: Tensor | None = None,
    responses: int,
    tokens: int,
) -> Loss:
    """Return the loss of a part of a mini-batch, an FP32 scalar, and statistics for `metrics.reduce_metrics`.

    Args:
        log_prob: [B, T], log-probs of the policy being trained. Only this argument receives a gradient.
        old_log_prob: [B, T], the trainer's log-probs before this step's updates.
        rollout_log_prob: [B, T], the log-probs that the sampling engine reported.
        advantages: [B], or [B, T] constant over the tokens of a row.
        response_mask: [B, T], bool or 0/1. Values at other positions are ignored, even NaN.
        weight: [B, T], the correction's weights, if `correction_weights` computed them for the whole batch. If None,
            they are computed here.
        responses, tokens: number of non-empty responses in the whole mini-batch before any rejection, and number of
            their tokens.

    TBPO's checks of values raise ValueError when its statistics are read. Raise UserError if the loss needs verl, but
    verl is not installed.
    """
    correction = settings.correction
    mask = response_mask != 0
    accepted = response_mask
    if correction.rejects:
        accepted = accepted_tokens(log_prob, old_log_prob, rollout_log_prob, mask, correction)
    inputs = LossInputs(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        rollout_log_prob=rollout_log_prob,
        advantages=advantages,
        mask=mask,
        accepted=accepted,
        weight=weight,
        responses=responses,
        tokens=tokens,
    )
    compute = get_objective(settings.loss).load()
    computed: Loss = compute(inputs, settings)
    return computed


def tbpo_objective(inputs: LossInputs, settings: Settings) -> Loss:
    """Return TBPO's loss and statistics. It weights the mismatch itself."""
    loss, statistics = unread_tbpo_loss(
        inputs.log_prob,
        inputs.old_log_prob,
        inputs.rollout_log_prob,
        inputs.advantages,
        inputs.accepted,
        settings.tbpo,
        global_batch_size=max(inputs.responses, 1),
    )
    if settings.correction.rejects:
        statistics |= correction_statistics(inputs.mask, inputs.accepted != 0, None)
    return loss, statistics


def mis_gspo_objective(inputs: LossInputs, settings: Settings) -> Loss:
    """Return GSPO's loss with sequence-level MIS of "When Speed Kills Stability" (Liu et al. 2025,
    https://richardli.xyz/rl-collapse), and its statistics."""
    mis = RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_mode="mask",
        rollout_is_threshold=settings.mis_imp_ratio_cap,
    )
    weight = correction_weights(inputs.old_log_prob, inputs.rollout_log_prob, inputs.mask, mis)
    return verl_objective(replace(inputs, weight=weight), settings)


def verl_objective(inputs: LossInputs, settings: Settings) -> Loss:
    """Return the loss and the statistics of an objective that is verl's function.

    verl's functions read every position, so those outside of `accepted` become 0."""
    objective = settings.objective
    accepted = inputs.accepted != 0
    correction = settings.correction
    weight = inputs.weight
    if weight is None:
        log_probs = (inputs.old_log_prob, inputs.rollout_log_prob)
        weight = correction_weights(*log_probs, inputs.mask, correction)
    new = torch.where(accepted, inputs.log_prob, 0.0).float()
    old = torch.where(accepted, inputs.old_log_prob.detach(), 0.0).float()
    rollout = torch.where(accepted, inputs.rollout_log_prob.detach(), 0.0).float()
    advantages = inputs.token_advantages
    against = rollout if correction.bypass_mode else old
    name_of_old = "old_log_prob" if objective.has_ratio else "rollout_log_prob"
    tensors = {
        "log_prob": new,
        name_of_old: against,
        "advantages": advantages.clamp(min=0.0) if objective.positive_only else advantages,
        "response_mask": accepted,
        "rollout_is_weights": weight,
    }
    assert objective.verl_function is not None
    loss, verl_metrics = verl_functions.policy_loss(
        objective.verl_function,
        settings,
        responses=inputs.responses,
        tokens=inputs.tokens,
        **tensors,
    )
    first = accepted.int().argmax(dim=-1, keepdim=True)
    advantage = advantages.gather(1, first).squeeze(1)
    statistics = loss_statistics(
        new,
        old,
        against,
        rollout,
        advantage,
        accepted,
        verl_metrics,
        uses_ratio=objective.has_ratio,
    )
    if correction.rejects or weight is not None:
        statistics |= correction_statistics(inputs.mask, accepted, weight)
    return loss, statistics


def correction_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    correction: RolloutCorrectionConfig,
) -> Tensor | None:
    """Return the weight of every token, FP32 [B, T], 0 outside `mask`. Return None if the correction has no weight.

    All tensors are [B, T]; `mask` is bool. With `rollout_is_batch_normalize`, pass the rows of a whole batch, because
    the weights are divided by their mean over these rows."""
    if correction.rollout_is is None:
        return None
    log_ratio = _log_ratio(old_log_prob, rollout_log_prob, mask)
    if not mask.any():  # verl's function needs a token
        return torch.zeros_like(log_ratio)
    if verl_functions.has_weight(correction):
        return verl_functions.correction_weights(log_ratio, mask, correction)
    ratio = _ratio(log_ratio, mask, correction.rollout_is)
    weight = _bounded(ratio, correction) * mask
    if correction.rollout_is_batch_normalize:
        mean = _mean(weight, mask, per_token=correction.rollout_is == "token")
        weight = weight / mean.clamp(min=1e-8)
    return weight


def accepted_tokens(
    log_prob: Tensor,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    correction: RolloutCorrectionConfig,
) -> Tensor:
    """Return `mask` without the rejected tokens, bool [B, T]. Each row is judged alone. All tensors are [B, T]."""
    if not mask.any():
        return mask
    accepted = mask
    if correction.rollout_rs:
        policy = log_prob if correction.rollout_rs_ratio == "ppo" else old_log_prob
        log_ratio = _log_ratio(policy, rollout_log_prob, mask)
        accepted = verl_functions.rejection_mask(log_ratio, mask, correction)
    if correction.veto_threshold is not None:
        improbable = old_log_prob.detach().float() < math.log(correction.veto_threshold)
        vetoed = (mask & improbable).any(dim=-1, keepdim=True)
        accepted = accepted & ~vetoed
    return accepted


def _log_ratio(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log r_corr of each token, FP32 [B, T], 0 outside of the mask."""
    difference = log_prob.detach().float() - rollout_log_prob.detach().float()
    return torch.where(mask, difference, 0.0)


def _ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return r_corr, [B, T], at `level`: of each token, or as a product or mean over the response."""
    if level != "token":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def _bounded(weight: Tensor, correction: RolloutCorrectionConfig) -> Tensor:
    """Return the weights within the bounds of `rollout_is_mode`."""
    upper = correction.rollout_is_threshold
    lower = correction.lower
    if correction.rollout_is_mode == "truncate":
        return weight.clamp(max=upper)
    if correction.rollout_is_mode == "clip":
        return weight.clamp(lower, upper)
    outside = weight > upper
    if correction.rollout_is_mode == "icepop":
        outside = outside | (weight < lower)
    return weight.masked_fill(outside, 0.0)


def _mean(weight: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """Return the mean weight, a scalar. The mean is over tokens if `per_token`, otherwise over responses."""
    if per_token:
        return weight.sum() / mask.sum()
    of_responses = weight.amax(dim=-1)
    return of_responses.sum() / mask.any(dim=-1).sum()
