"""The keys that choose the objective, and how it is corrected for the mismatch of trainer and rollout engine.

`ObjectiveKeys` are keys of the section `actor`, `RolloutCorrectionConfig` is the section `rollout_correction`. A key
that verl has too (`actor.clip_ratio_low`, `algorithm.rollout_correction.rollout_is`) has verl's name. There are three
departures. Thresholds of a rejection are in nats for every estimator, while verl takes those of k1 as ratios. `clip`
and `mask` are modes with names, while verl reads IcePop from the form of a threshold. The two ratios of a rejection
(arXiv 2605.14220, section 4.2) are a key, while in verl they follow from `bypass_mode`. docs/objectives.md has the
formula and the source of every value.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from qarl.config.section import Section
from qarl.config.types import Above, Below, Unit, as_list

LossName = Literal["tbpo", "grpo", "dual_clip", "gspo", "mis_gspo", "positive_only", "sapo", "reinforce"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
LossAggMode = Literal["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"]
AdvEstimator = Literal["grpo", "rloo", "dr_grpo"]
Level = Literal["token", "sequence", "geometric"]
WeightMode = Literal["truncate", "clip", "mask", "icepop"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
REJECTIONS: tuple[Rejection, ...] = get_args(Rejection)
Rejections = Annotated[list[Rejection], BeforeValidator(as_list)]
Thresholds = Annotated[
    list[Annotated[float, Field(gt=0, le=1e6)]],
    BeforeValidator(lambda value: [value] if isinstance(value, int | float) else value),
]


class ObjectiveKeys(Section):
    """The keys of the section `actor` that choose the objective."""

    loss: LossName = "tbpo"
    """The objective. `tbpo`: QaRL's. `grpo`: PPO's clipped ratio of each token. `dual_clip`: the same with a third
    bound for negative advantages. `gspo`: one clipped ratio per response. `mis_gspo`: the same, weighted by the
    response's trainer/rollout ratio, and without the responses whose ratio is too large. `positive_only`: `grpo`
    without negative advantages. `sapo`: a soft gate instead of clipping. `reinforce`: no ratio at all, and rewards
    whitened over the batch as advantages."""

    loss_agg_mode: LossAggMode = "seq-mean-token-mean"
    """How token losses are averaged. Losses with one ratio per response (tbpo, gspo, mis_gspo) and sapo allow only
    seq-mean-token-mean. With algorithm.adv_estimator=dr_grpo it is always seq-mean-token-sum-norm."""

    clip_ratio_low: Below | None = None
    """A token's ratio (for gspo and mis_gspo a response's) is clipped at 1 - this value. null means 0.2, and 3e-4 for
    gspo and mis_gspo, as in their papers. Not used by tbpo, sapo and reinforce."""

    clip_ratio_high: Above | None = None
    """The same ratio is clipped at 1 + this value. null means 0.2, and 4e-4 for gspo and mis_gspo."""

    clip_ratio_c: float = Field(default=3.0, gt=1, le=1e6)
    """With dual_clip: the ratio from which a token with a negative advantage has no gradient."""

    tau_pos: float = Field(default=1.0, gt=0, le=1e3)
    """With sapo: the gate's temperature for positive advantages."""

    tau_neg: float = Field(default=1.05, gt=0, le=1e3)
    """With sapo: the gate's temperature for negative advantages. A larger value gives a faster decay."""

    mis_imp_ratio_cap: float = Field(default=2.0, gt=0, le=1e6)
    """With mis_gspo: a response has no gradient if its trainer/rollout ratio, a product over its tokens, is larger."""


class RolloutCorrectionConfig(Section):
    """Corrections for the mismatch of trainer and rollout engine. By default nothing is corrected.

    r_corr is the ratio of the trainer's old probability of a token to the rollout's. r_ppo is the ratio of its current
    probability to the rollout's. TBPO already weights the mismatch, so it refuses a second weight.
    """

    bypass_mode: bool = False
    """Clip the ratio to the rollout's log-probs instead of the trainer's old ones. The old ones are still computed, for
    the metrics and for r_corr."""

    rollout_is: Level | None = None
    """Weight each token's loss by r_corr. `token`: of this token. `sequence`: the product over the response.
    `geometric`: the geometric mean over the response. null means no weight."""

    rollout_is_mode: WeightMode = "truncate"
    """What happens to a weight out of bounds. `truncate`: at most the upper bound. `clip`: between both bounds. `mask`:
    0 above the upper bound. `icepop`: 0 outside both bounds."""

    rollout_is_threshold: Above = 2.0
    """The upper bound of a weight."""

    rollout_is_threshold_lower: Above | None = None
    """The lower bound of a weight, for clip and icepop. null means 1 / rollout_is_threshold."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the step's batch, after the bounds."""

    rollout_rs: Rejections = []
    """Reject tokens (`token_*`) or responses (`seq_*`) whose divergence is above its threshold: K1 = -log r, K2 =
    log(r)^2 / 2 or K3 = r - 1 - log r, of a token, or its sum, mean or maximum over the response. Several may be
    listed. What is rejected has no gradient, but rejected responses stay in the mean's denominator."""

    rollout_rs_threshold: Annotated[Thresholds, Unit("nats")] = []
    """Largest divergence for each entry of rollout_rs, or one for all."""

    rollout_rs_threshold_lower: Annotated[float | None, Unit("nats")] = Field(default=None, ge=-1e6, le=1e6)
    """Smallest divergence for k1, which can be negative. null means that k1 has only an upper threshold."""

    rollout_rs_ratio: Literal["corr", "ppo"] = "corr"
    """The ratio r of a rejection: r_corr (the mismatch), or r_ppo (the mismatch and the updates of this step)."""

    veto_threshold: Annotated[float | None, Unit("probability")] = Field(default=None, gt=0, lt=1)
    """Reject every response with a token whose old probability is below this value, for example 1e-6."""
